// The register-blocked microkernel, and the two ways it is swept over a block.
#pragma once
#include "operands.h"

namespace TW_NAMESPACE {

// So many products are added one after another; longer sums are made of such sums. Where a product and its addition round together (FMA), scores
// alone need it: a chain of 205 (head_dim) put LSE 2.6 times beyond its tolerance; splitting the sums over keys and rows as well cost up to 11 % of
// the backward (d64, one thread). Where they round separately (x86 before FMA), every sum needs it.
#if defined(__FMA__) || defined(__aarch64__)
constexpr int64_t kScoreChain = 64, kUpdateChain = INT64_MAX;
#else
constexpr int64_t kScoreChain = 16, kUpdateChain = 16;
#endif

template <class Op, int M, int W>
TW_INLINE void add_products(vf (&acc)[M][W], const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t ldb, int64_t begin,
                            int64_t end) {
  TW_UNROLL for (int r = 0; r < M; r++) TW_UNROLL for (int w = 0; w < W; w++) acc[r][w] = vf{};
  for (int64_t k = begin; k < end; k++) {
    vf x[W];
    TW_UNROLL for (int w = 0; w < W; w++) x[w] = load(b + k * ldb + w * L);
    TW_UNROLL for (int r = 0; r < M; r++) {
      const vf y = splat(a[r * row_step + k * depth_step]);
      TW_UNROLL for (int w = 0; w < W; w++) acc[r][w] = Op::multiply_add(acc[r][w], y, x[w]);
    }
  }
}

// acc[r][w] = sum_k A[r * row_step + k * depth_step] * B[k * ldb + w * L], given to the epilogue in registers.
// Every sum starts at zero, so that a block's contribution is rounded at its own magnitude before it joins a long running sum.
template <class Op, int M, int W, class Epilogue>
TW_INLINE void tile_product(const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t ldb, int64_t depth, Epilogue epilogue,
                            int64_t chain = kScoreChain) {
  vf acc[M][W];
  add_products<Op, M, W>(acc, a, row_step, depth_step, b, ldb, 0, min_of(depth, chain));
  for (int64_t k = chain; k < depth; k += chain) {
    vf more[M][W];
    add_products<Op, M, W>(more, a, row_step, depth_step, b, ldb, k, min_of(depth, k + chain));
    TW_UNROLL for (int r = 0; r < M; r++) TW_UNROLL for (int w = 0; w < W; w++) acc[r][w] += more[r][w];
  }
  epilogue(acc);
}

// C = C * rescale[row] + acc, or C + acc * factor.
enum class Update { kRescale, kAccumulate };

template <class Op, Update U, int M, int W>
TW_INLINE void update_tile(float* c, int64_t ldc, const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t ldb, int64_t depth,
                           const float* rescale, float factor) {
  tile_product<Op, M, W>(a, row_step, depth_step, b, ldb, depth, [&](vf(&acc)[M][W]) {
    TW_UNROLL for (int r = 0; r < M; r++) TW_UNROLL for (int w = 0; w < W; w++) {
      float* p = c + r * ldc + w * L;
      store(p, U == Update::kRescale ? load(p) * splat(rescale[r]) + acc[r][w] : load(p) + acc[r][w] * factor);
    }
  }, min_of(depth, kUpdateChain));
}

template <class Op, Update U, int W>
static void update_columns(float* c, int64_t ldc, int64_t rows, const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t ldb,
                           int64_t depth, const float* rescale, float factor) {
  constexpr int M = tile_rows(W);
  int64_t r = 0;
#define TW_ROWS(N)                \
  for (; r + N <= rows; r += N) update_tile<Op, U, N, W>(c + r * ldc, ldc, a + r * row_step, row_step, depth_step, b, ldb, depth, rescale + r, factor)
  TW_ROWS(M);
  if constexpr (M > 4) TW_ROWS(4);
  TW_ROWS(2);
  TW_ROWS(1);
#undef TW_ROWS
}

// C[rows][columns] (columns a multiple of kPad), lanes along the columns: O, dQ, dK, dV.
template <class Op, Update U>
static void update_rows(float* c, int64_t ldc, int64_t rows, int64_t columns, const float* a, int64_t row_step, int64_t depth_step, Operand b,
                        int64_t depth, const float* rescale, float factor) {
  int64_t w = 0;
#define TW_COLUMNS(N)                                     \
  for (; w + N * L <= columns; w += N * L)                \
  update_columns<Op, U, N>(c + w, ldc, rows, a, row_step, depth_step, b.words + w, b.stride, depth, rescale, factor)
  TW_COLUMNS(kColumnVectors);
#if TW_VECTOR_BYTES == 64
  TW_COLUMNS(3);
  TW_COLUMNS(2);
  TW_COLUMNS(1);
#endif
#undef TW_COLUMNS
}

// Runs a tile over `rows` rows: full register tiles, then ever smaller ones, whose sums wait for their own latency alone and so take as long as large
// ones. With kPack 2 the number of rows is even, and so is every tile.
template <class Op, int W, class Tile>
TW_INLINE void for_row_tiles(int64_t rows, const Tile& tile) {
  constexpr int M = tile_rows(W);
  int64_t r = 0;
  for (; r + M <= rows; r += M) Tile::template run<M>(tile, r);
  if constexpr (M > 8)
    if (r + 8 <= rows) Tile::template run<8>(tile, r), r += 8;
  if constexpr (M > 4)
    if (r + 4 <= rows) Tile::template run<4>(tile, r), r += 4;
  for (; r + 2 <= rows; r += 2) Tile::template run<2>(tile, r);
  if constexpr (Op::kPack == 1)
    if (r < rows) Tile::template run<1>(tile, r);
}

}  // namespace TW_NAMESPACE
