// Matrix products on AMX: tiles of 16 rows of 64 bytes, C[16][16] fp32 += A[16][32] bf16 * B[32][16] bf16, B's rows two by two in 32-bit words.
//
// Every matrix lies in memory as columns of 64-byte cells, so that a tile is 1,024 consecutive bytes:
//   A  cell (m, k)   = A[m][32 k .. 32 k + 31]                       bf16
//   B  cell (k, n)   = words (B[2 k][16 n + i], B[2 k + 1][16 n + i]), i < 16
//   C  cell (m, n)   = C[m][16 n .. 16 n + 15]                       fp32
// A number is the sum of `planes` bf16 ones: 1 for bf16, 2 for fp16, 3 for fp32 (24 bits, exactly). Of the products of planes those are taken that a
// fp32 result notices: 1 of 1, 4 of 4, 6 of 9, smallest first (Henry, Tang and Heinecke, arXiv:1904.06376).
#pragma once
#include "elementary.h"
#if defined(TW_EMULATED_TILES)
#include "emulated_tiles.h"
#endif

namespace TW_NAMESPACE {

constexpr int64_t kCell = 64, kTile = 1024;  // bytes

struct Cells {
  char* base;
  int64_t rows;   // cells of a column
  int64_t plane;  // bytes from plane to plane
  char* at(int64_t row, int64_t column) const { return base + (column * rows + row) * kCell; }
  Cells from(int64_t row, int64_t column) const { return {at(row, column), rows, plane}; }
};
TW_INLINE float* floats(const Cells& c, int64_t row, int64_t column) { return (float*)c.at(row, column); }

// The compiler's own view of memory ends at tile loads and stores.
TW_INLINE void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// Eight tiles of 16 rows of 64 bytes while it lives; afterwards none, so that a switch of threads saves nothing and others find the unit as new.
struct TileUnit {
  TileUnit() {
    alignas(64) static const uint8_t config[64] = {1,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  //
                                                   64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  //
                                                   0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  //
                                                   16, 16, 16, 16, 16, 16, 16, 16};
    _tile_loadconfig(config);
    memory_barrier();
  }
  ~TileUnit() {
    memory_barrier();
    _tile_release();
  }
};

// Products of planes of A and B, [planes][product].
constexpr int kProducts[4] = {0, 1, 4, 6};
constexpr int kPlanesOfA[4][6] = {{}, {0}, {1, 0, 1, 0}, {0, 2, 1, 0, 1, 0}};
constexpr int kPlanesOfB[4][6] = {{}, {0}, {1, 1, 0, 0}, {2, 0, 1, 1, 0, 0}};

// Vector work that is done beside products, so that the processor overlaps the two: next() does a piece of it, `pieces` are left, to be spread
// evenly over `steps` steps of products (measured: docs/cpu-notes.md).
struct Nothing {
  TW_MEMBER void step() {}
};
template <class Work>
struct Beside {
  Work& work;
  int64_t steps, pieces = work.pieces, due = 0;
  TW_MEMBER void step() {
    for (due += pieces; due >= steps; due -= steps) work.next();
  }
};

// M x N tiles of C, M and N at most 2: C = A B, or C += A B.
template <int T, int M, int N, class Other>
TW_INLINE void tile_product(char* c, int64_t c_column, const Cells& a, const Cells& b, int64_t steps, bool add, Other& other) {
  if (add) {
    _tile_loadd(0, c, kCell);
    if constexpr (N == 2) _tile_loadd(1, c + c_column, kCell);
    if constexpr (M == 2) _tile_loadd(2, c + kTile, kCell);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, c + c_column + kTile, kCell);
  } else {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (M == 2) _tile_zero(2);
    if constexpr (M == 2 && N == 2) _tile_zero(3);
  }
  for (int product = 0; product < kProducts[T]; product++) {
    const char* pa = a.base + kPlanesOfA[T][product] * a.plane;
    const char* pb = b.base + kPlanesOfB[T][product] * b.plane;
    for (int64_t k = 0; k < steps; k++, pa += a.rows * kCell, pb += kTile) {
      _tile_loadd(6, pb, kCell);
      _tile_loadd(4, pa, kCell);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (N == 2) {
        _tile_loadd(7, pb + b.rows * kCell, kCell);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (M == 2) {
        _tile_loadd(5, pa + kTile, kCell);
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (M == 2 && N == 2) _tile_dpbf16ps(3, 5, 7);
      other.step();
    }
  }
  _tile_stored(0, c, kCell);
  if constexpr (N == 2) _tile_stored(1, c + c_column, kCell);
  if constexpr (M == 2) _tile_stored(2, c + kTile, kCell);
  if constexpr (M == 2 && N == 2) _tile_stored(3, c + c_column + kTile, kCell);
}

template <int T, int M, int N, class Other>
static void product_block(char* c, int64_t c_column, const Cells& a, const Cells& b, int64_t steps, bool add, Other& other) {
  if (T < 3 || !add) return tile_product<T, M, N>(c, c_column, a, b, steps, add, other);
  // fp32: a block's sum is rounded at its own magnitude before it joins a long one.
  alignas(64) char sum[M * N * kTile];
  tile_product<T, M, N>(sum, M * kTile, a, b, steps, false, other);
  memory_barrier();
  TW_UNROLL for (int n = 0; n < N; n++) for (int r = 0; r < 16 * M; r++) {
    float* p = (float*)(c + n * c_column + r * kCell);
    store(p, load(p) + load((const float*)(sum + (n * M * 16 + r) * kCell)));
  }
}

// The steps of a matrix_product.
template <int T>
TW_INLINE int64_t product_steps(int64_t m, int64_t n, int64_t steps) { return (m + 1) / 2 * ((n + 1) / 2) * kProducts[T] * steps; }

// C (+)= A B, of m x n tiles, over `steps` times 32 of what is summed over.
template <int T, class Other>
static void matrix_product(const Cells& c, const Cells& a, const Cells& b, int64_t m, int64_t n, int64_t steps, bool add, Other& other) {
  memory_barrier();
  const int64_t column = c.rows * kCell;
  for (int64_t y = 0; y < n; y += 2)
    for (int64_t x = 0; x < m; x += 2) {
      char* to = c.at(16 * x, y);
      const Cells from_a = a.from(16 * x, 0), from_b = b.from(0, y);
      if (m - x > 1 && n - y > 1) product_block<T, 2, 2>(to, column, from_a, from_b, steps, add, other);
      else if (m - x > 1) product_block<T, 2, 1>(to, column, from_a, from_b, steps, add, other);
      else if (n - y > 1) product_block<T, 1, 2>(to, column, from_a, from_b, steps, add, other);
      else product_block<T, 1, 1>(to, column, from_a, from_b, steps, add, other);
    }
  memory_barrier();
}
template <int T>
static void matrix_product(const Cells& c, const Cells& a, const Cells& b, int64_t m, int64_t n, int64_t steps, bool add) {
  Nothing nothing;
  matrix_product<T>(c, a, b, m, n, steps, add, nothing);
}

}  // namespace TW_NAMESPACE
