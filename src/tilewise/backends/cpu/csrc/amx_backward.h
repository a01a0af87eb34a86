// The backward on AMX: the arithmetic and the walk of backward.h, in tiles.
//
// S^T = K Q^T and dP^T = V dO^T are [key][row], 32 keys and up to 96 rows at a time; P and dS leave the softmax as bf16 twice: rows side by side for
// dV = P^T dO and dK = dS^T Q, keys in pairs for dQ^T = K^T dS^T, whose rows are head_dim until the end.
#pragma once
#include "amx_forward.h"

namespace TW_NAMESPACE {

constexpr int64_t kTileGradKeys = 192;               // most keys of a step
constexpr int64_t kTileGradRows = TW_ROW_BLOCK;      // rows of a step
constexpr int64_t kTileColumns = kTileGradRows / L;  // columns of those rows
constexpr int64_t kChunkBytes = 1280 << 10;          // of keys and their gradients, close to a thread
constexpr int64_t kTileLocalDqBytes = 512 << 10;

struct TileBackward {
  const tw_args& args;
  int64_t block, chunk, chunks;      // keys
  int64_t batch_step, head_step, groups, together;
  int64_t row_blocks;                // of kTileGradRows
  bool alone;                        // a head's chunks follow one another in one thread: the first that sees a row finds delta, the last stores dQ
  float* delta;                      // (batch, heads_q, seqlen_q); null where one chunk is all
  float* lse;                        // likewise, of lse_of_rows; null without a sink
  bool local_dq;
  float* dq;                         // (batch, heads_q, row_blocks) of kTileColumns columns of round_up(head_dim, 16) cells
  int64_t* turns;
  int64_t bytes;
  int32_t* splits;  // 0 once a finite number did not
};

template <int T>
static TileBackward plan_tile_backward(const tw_args& a, int32_t* splits) {
  const int64_t dim = round_up(a.head_dim, 32), dim_v = round_up(a.head_dim_v, 32);
  TileBackward p = {a, even_blocks(a.seqlen_k, kTileGradKeys, 32), 0, 0, 1, 1, 0, 0, 0, false, nullptr, nullptr, false, nullptr, nullptr, 0, splits};
  if (a.dbias.data && a.dbias.batch == 0) p.batch_step = a.batch;
  if (a.dbias.data && a.dbias.head == 0) p.head_step = a.heads_k;
  p.groups = a.batch / max_of(p.batch_step, (int64_t)1) * (a.heads_k / p.head_step);
  int64_t blocks = max_of(kChunkBytes / (p.block * ((2 * dim + dim_v) * 2 * T + (dim + dim_v) * 4 + 1)), (int64_t)1);
  blocks = min_of(blocks, max_of((a.seqlen_k + p.block - 1) / p.block, (int64_t)1));
  while (blocks > 1 && a.threads > 1 && p.groups * ((a.seqlen_k + blocks * p.block - 1) / (blocks * p.block)) < 4 * a.threads) blocks--;
  p.chunk = blocks * p.block;
  p.chunks = (a.seqlen_k + p.chunk - 1) / p.chunk;
  if (p.batch_step == 1) p.together = heads_together(a, p.groups, a.heads_k / p.head_step);
  p.row_blocks = (a.seqlen_q + kTileGradRows - 1) / kTileGradRows;
  Arena arena = {(char*)a.workspace};
  const int64_t dq_floats = p.row_blocks * kTileGradRows * round_up(a.head_dim, 16);
  p.turns = (int64_t*)arena.floats(2 * p.chunks * p.groups);
  p.alone = p.chunks == 1 || p.together > 0;
  if (p.chunks > 1 || a.dsink) p.delta = arena.floats(a.batch * a.heads_q * a.seqlen_q);
  if (a.dsink) p.lse = arena.floats(a.batch * a.heads_q * a.seqlen_q);
  p.local_dq = p.chunks == 1 && dq_floats * 4 <= kTileLocalDqBytes;
  if (!p.local_dq) p.dq = arena.floats(a.batch * a.heads_q * dq_floats);
  p.bytes = (int64_t)arena.used;
  return p;
}

// dQ of a block of rows: columns of C whose cells are head_dim.
static Cells dq_cells(const TileBackward& p, const Head& h, int64_t block, float* local) {
  const int64_t dim = round_up(p.args.head_dim, 16), head = h.batch * p.args.heads_q + h.head;
  float* base = p.local_dq ? local + block * kTileGradRows * dim : p.dq + (head * p.row_blocks + block) * kTileGradRows * dim;
  return {(char*)base, dim, 0};
}

// The chunks of keys that some of a block's rows see; none: first is -1.
struct Visits {
  int64_t first, last;
};
static Visits visits_of(const TileBackward& p, const Head& h, int64_t block) {
  const int64_t row = block * kTileGradRows;
  const SeenKeys seen = keys_seen(h, row, min_of(kTileGradRows, p.args.seqlen_q - row));
  return seen.begin < seen.end ? Visits{seen.begin / p.chunk, (seen.end - 1) / p.chunk} : Visits{-1, -1};
}

struct TileKeys {
  int64_t key, keys;
  Cells k, v, k_columns;  // A: keys are rows, twice; head_dim is rows
  Cells dk, dv;           // C: keys are cells
  OddRows odd_k, odd_v;
};

// Where delta = rowsum(dO O) of 32 rows is found, as the diagonal of a product.
struct DeltaCells {
  Cells o, product;  // A: rows; C
};
template <int T>
static DeltaCells delta_cells(Arena& arena, const tw_args& a) {
  return {bf16_cells<T>(arena, 32, round_up(a.head_dim_v, 32) / 32), arena_cells(arena, 32, 2, 1)};
}

// delta = rowsum(dO O) - dlse of at most 32 rows, whose dO is packed as columns. It is added up in the tiles in which dP will be, so that the two
// cancel to the last bit where a row sees one key. Rows without lse count as 0. odd: rows of dO that were packed as zeros.
template <int T>
static void find_tile_delta(float* delta, const DeltaCells& cells, const Cells& d_o, const Head& h, int64_t row, int64_t rows, uint32_t odd,
                            char* scratch, bool& splits) {
  const tw_args& a = h.args;
  uint32_t odd_o = 0;
  OddRows odd_rows = {&odd_o};
  pack_finite<T>({h.out(a.o, row, h.head), a.o.seq, rows, a.head_dim_v}, odd_rows, scratch, splits,
                 [&](const Rows<T>& in, Finite<T>& finite) { pack_rows<T>(cells.o, in, 32, finite); });
  for (int64_t w = 0; w < 2; w++)
    matrix_product<T>(cells.product.from(16 * w, w), cells.o.from(16 * w, 0), d_o.from(0, w), 1, 1, (a.head_dim_v + 31) / 32, false);
  for_bits(odd | odd_o, [&](int64_t i) {
    floats(cells.product, i, i / L)[i % L] = dot_of<T, true>(h.out(a.o, row + i, h.head), h.out(a.d_o, row + i, h.head), a.head_dim_v);
  });
  for (int64_t i = 0; i < rows; i++) {
    const int64_t at = h.statistics(row + i);
    delta[i] = a.lse[at] == -kInf ? 0.f : floats(cells.product, i, i / L)[i % L] - (a.d_lse ? a.d_lse[at] : 0.f);
  }
}

struct TileQueries {
  int64_t row, rows, columns;  // columns of 16 rows, an even number
  Cells q, d_o;                // B: rows are columns
  Cells q_pairs, d_o_pairs;    // B: rows are summed over
  float *lse, *delta;          // lse is +inf where the row saw nothing, so that P = 0
  DeltaCells delta_cells;
  bool dead_rows, fused;  // some row saw nothing; no LSE is above kFusedScores
  OddRows odd_q, odd_d_o;
  // Of 32 rows, those that saw anything.
  uint32_t alive(int64_t first) const {
    uint32_t bits = 0;
    for (int64_t i = 0; i < 32; i++) bits |= (uint32_t)(lse[first + i] != kInf) << i;
    return bits;
  }
};

struct TileGradBuffers {
  Cells s, dp;                // C, 32 keys
  Cells p, ds;                // A: keys are rows
  Cells ds_keys;              // B: keys are summed over
  Cells kept, cap;            // as C: factors of dropout; 1 - tanh^2 of the softcap
};

template <int T>
struct TileBackwardScratch {
  TileKeys keys;
  TileQueries queries;
  TileGradBuffers buffers[kOverlaps<T> ? 2 : 1] = {};
  float* dq;
  char* finite;  // rows without those that are not
  TileBackwardScratch(Arena& arena, const TileBackward& plan) {
    const tw_args& a = plan.args;
    const int64_t dim = round_up(a.head_dim, 32), dim_v = round_up(a.head_dim_v, 32), pairs = kTileGradRows / 2;
    dq = arena.floats(plan.local_dq ? plan.row_blocks * kTileGradRows * round_up(a.head_dim, 16) : 0);
    keys.k = bf16_cells<T>(arena, plan.chunk, dim / 32);
    keys.v = bf16_cells<T>(arena, plan.chunk, dim_v / 32);
    keys.k_columns = bf16_cells<T>(arena, round_up(a.head_dim, 16), plan.chunk / 32);
    keys.dk = arena_cells(arena, plan.chunk, dim / 16, 1);
    keys.dv = arena_cells(arena, plan.chunk, dim_v / 16, 1);
    queries.q = bf16_cells<T>(arena, dim / 2, kTileColumns);
    queries.d_o = bf16_cells<T>(arena, dim_v / 2, kTileColumns);
    queries.q_pairs = bf16_cells<T>(arena, pairs, dim / 16);
    queries.d_o_pairs = bf16_cells<T>(arena, pairs, dim_v / 16);
    queries.lse = arena.floats(kTileGradRows);
    queries.delta = arena.floats(kTileGradRows);
    if (plan.alone) queries.delta_cells = delta_cells<T>(arena, a);
    for (TileGradBuffers& b : buffers) {
      b.s = arena_cells(arena, 32, kTileColumns, 1);
      b.dp = arena_cells(arena, 32, kTileColumns, 1);
      b.p = bf16_cells<T>(arena, 32, kTileColumns / 2);
      b.ds = bf16_cells<T>(arena, 32, kTileColumns / 2);
      b.ds_keys = &b == buffers ? bf16_cells<T>(arena, plan.block / 2, kTileColumns) : buffers[0].ds_keys;
      if (a.dropout_rescale > 0) b.kept = arena_cells(arena, 32, kTileColumns, 1);
      if (a.softcap > 0) b.cap = arena_cells(arena, 32, kTileColumns, 1);
    }
    keys.odd_k.words = (uint32_t*)arena.floats(plan.chunk / 32);
    keys.odd_v.words = (uint32_t*)arena.floats(plan.chunk / 32);
    queries.odd_q.words = (uint32_t*)arena.floats(kTileGradRows / 32);
    queries.odd_d_o.words = (uint32_t*)arena.floats(kTileGradRows / 32);
    finite = (char*)arena.floats(max_of(plan.chunk, kTileGradRows) * max_of(a.head_dim, a.head_dim_v));
  }
};

template <int T>
static void load_tile_queries(TileQueries& queries, const TileBackward& plan, const Head& h, int64_t row, bool first, char* scratch, bool& splits) {
  const tw_args& a = plan.args;
  const int64_t rows = min_of(kTileGradRows, a.seqlen_q - row), padded = round_up(rows, 32);
  queries.row = row;
  queries.rows = rows;
  queries.columns = padded / L;
  queries.dead_rows = false, queries.fused = true;
  const Rows<T> q = {h.q(row), a.q.seq, rows, a.head_dim}, d_o = {h.out(a.d_o, row, h.head), a.d_o.seq, rows, a.head_dim_v};
  const Rows<T> finite_q = pack_finite<T>(
      q, queries.odd_q, scratch, splits, [&](const Rows<T>& in, Finite<T>& finite) { pack_rows_transposed<T>(queries.q, in, padded, finite); });
  pack_pairs<T>(queries.q_pairs, finite_q, padded);
  const Rows<T> finite_d_o = pack_finite<T>(
      d_o, queries.odd_d_o, scratch, splits, [&](const Rows<T>& in, Finite<T>& finite) { pack_rows_transposed<T>(queries.d_o, in, padded, finite); });
  pack_pairs<T>(queries.d_o_pairs, finite_d_o, padded);
  for (int64_t i = 0; first && i < rows; i += 32)
    find_tile_delta<T>(queries.delta + i, queries.delta_cells, queries.d_o.from(0, i / L), h, row + i, min_of(rows - i, (int64_t)32),
                       queries.odd_d_o.at(i), scratch, splits);
  if (plan.delta) {
    float* kept = plan.delta + h.statistics(row);
    memcpy(first ? kept : queries.delta, first ? queries.delta : kept, (size_t)rows * sizeof(float));
  }
  for (int64_t i = 0; T > 1 && i < rows; i++)
    if (__builtin_isinf(queries.delta[i])) splits = false;  // nor will dS
  if (plan.lse) memcpy(queries.lse, plan.lse + h.statistics(row), (size_t)rows * sizeof(float));
  else lse_of_rows(queries.lse, h, row, rows);
  for (int64_t i = 0; i < rows; i++) {
    queries.dead_rows |= queries.lse[i] == kInf;
    queries.fused &= queries.lse[i] == kInf || __builtin_fabsf(queries.lse[i]) < kFusedScores;
  }
  for (int64_t i = rows; i < padded; i++) queries.lse[i] = kInf, queries.delta[i] = 0.f;
}

// P and dS of two keys and a pair of columns, from S and dP. General: masks, score modifiers, dropout.
template <int T, bool General, bool Fused>
TW_INLINE void weigh_gradients(const TileQueries& queries, const TileGradBuffers& b, int64_t key, int64_t w, vf factor, int64_t pair, bool keep_ds) {
  vf p[4], ds[4];  // (key, column), (key, column + 1), (key + 1, column), ...
  const vf lse[2] = {load(queries.lse + w * L), load(queries.lse + (w + 1) * L)};
  const vf delta[2] = {load(queries.delta + w * L), load(queries.delta + (w + 1) * L)};
  TW_UNROLL for (int u = 0; u < 4; u++) {
    vf s = load(floats(b.s, key + u / 2, w + u % 2)) * factor;
    if constexpr (Fused) {
      p[u] = s - lse[u % 2] * splat(kLog2e);
    } else {
      __asm__("" : "+v"(s));  // rounded as in the forward: of a huge score nothing must be left but its difference to LSE's own bits
      p[u] = (s - lse[u % 2]) * splat(kLog2e);
    }
    p[u] = at_most_0(p[u]);
  }
  power_each<T, 4>(p);
  TW_UNROLL for (int u = 0; u < 4; u++) {
    const int64_t row = key + u / 2, column = w + u % 2;
    float* dp = floats(b.dp, row, column);
    if constexpr (General) {
      const vi hidden = (load((const int32_t*)floats(b.s, row, column)) == splat(kHiddenBits)) | (lse[u % 2] == splat(kInf));
      const vf kept = b.kept.base ? load(floats(b.kept, row, column)) : splat(1.f);
      ds[u] = hidden ? vf{} : p[u] * (load(dp) * kept - delta[u % 2]);
      p[u] = hidden ? vf{} : p[u] * kept;
      if (keep_ds) store(dp, ds[u]);
      if (b.cap.base) ds[u] = hidden ? vf{} : ds[u] * load(floats(b.cap, row, column));
    } else {
      ds[u] = p[u] * (load(dp) - delta[u % 2]);
    }
  }
  TW_UNROLL for (int r = 0; r < 2; r++) {
    store_halves<T, false>(b.p.at(key + r, w / 2), b.p.plane, p[2 * r], p[2 * r + 1]);
    store_halves<T, false>(b.ds.at(key + r, w / 2), b.ds.plane, ds[2 * r], ds[2 * r + 1]);
    store_words<T, false>(b.ds_keys.at(pair, w + r), b.ds_keys.plane, ds[r], ds[2 + r]);
  }
}

// 32 keys of a band's crop as a crop of their own, though they may be hidden from all of the rows.
TW_INLINE Crop key_group(const BandList& bands, int64_t x, int64_t row, int64_t rows, int64_t key, int64_t keys) {
  Crop c = crop(bands, x, row, rows, key, keys, 1);
  c.partial |= c.empty() || c.key_end - c.key_begin != 32;
  c.key_begin = key;
  c.key_end = key + 32;
  return c;
}

// 32 keys of a band's crop against the rows.
struct GradStep {
  Crop crop = {};
  int64_t x = 0, pair = 0;  // the band; where the keys' pairs begin in ds_keys
  int64_t left = 1;         // steps of these rows, about, with this one
  bool any = false;
};

// P and dS of a step from its scores: next() makes those of two keys and a pair of columns, and fetches some of what is read later.
template <int T>
struct GradWeights {
  const TileQueries& queries;
  const TileGradBuffers& buffers;
  Ahead& ahead;
  vf scale;
  int64_t pair, pieces;
  bool general, fused, keep_ds;
  int64_t w = 0, j = 0;

  template <bool General, bool Fused>
  TW_MEMBER void weigh() { weigh_gradients<T, General, Fused>(queries, buffers, j, w, scale, pair + j / 2, General && keep_ds); }
  __attribute__((noinline)) void weigh_general() { T < 3 && fused ? weigh<true, true>() : weigh<true, false>(); }
  TW_MEMBER void next() {
    ahead.piece();
    if (general) weigh_general();
    else if (T < 3 && fused) weigh<false, true>();
    else weigh<false, false>();
    if ((j += 2) == 32) j = 0, w += 2;
  }
};

// Steps one after another, each in three: S and dP; P and dS; what they add to dV and dK. Where it pays, while P and dS of one step are made, the tiles
// multiply for the step before and the step after (see TilePipeline).
template <int T>
struct GradPipeline {
  const Head& h;
  const TileKeys& keys;
  const TileQueries& queries;
  const BandList& bands;
  const TileGradBuffers* buffers;  // in turns
  Ahead& ahead;
  bool& splits;
  GradStep last, now;              // last: wants its gradients added; now: has S and dP
  int turn = 0;                    // now's buffers

  int64_t at(const GradStep& s) const { return s.crop.key_begin - keys.key; }
  template <class Other>
  void scores(const GradStep& s, const TileGradBuffers& b, Other& other) const {
    matrix_product<T>(b.s, keys.k.from(at(s), 0), queries.q, 2, queries.columns, (h.args.head_dim + 31) / 32, false, other);
    matrix_product<T>(b.dp, keys.v.from(at(s), 0), queries.d_o, 2, queries.columns, (h.args.head_dim_v + 31) / 32, false, other);
  }
  template <class Other>
  void gradients(const GradStep& s, const TileGradBuffers& b, Other& other) const {
    matrix_product<T>(keys.dv.from(at(s), 0), b.p, queries.d_o_pairs, 2, (h.args.head_dim_v + 15) / 16, queries.columns / 2, true, other);
    matrix_product<T>(keys.dk.from(at(s), 0), b.ds, queries.q_pairs, 2, (h.args.head_dim + 15) / 16, queries.columns / 2, true, other);
    if (queries.odd_q.any || queries.odd_d_o.any) add_odd_queries(s, b);
  }
  // Of rows [first, first + 32) of the block.
  Crop part(const GradStep& s, int64_t first) const {
    return {queries.row + first, min_of((int64_t)32, queries.rows - first), s.crop.key_begin, s.crop.key_end, false};
  }
  SeenRows seen(const GradStep& s, int64_t first) const { return {bands, s.x, 1, part(s, first), s.crop.key_begin, queries.alive(first)}; }
  Rows<T> rows_of(const char* data, const tw_tensor& t, int64_t dim, int64_t first) const {
    return {data, t.seq, min_of((int64_t)32, queries.rows - first), dim};
  }
  Rows<T> keys_of(const GradStep& s, const char* data, const tw_tensor& t, int64_t dim) const {
    return {data, t.seq, min_of((int64_t)32, h.args.seqlen_k - s.crop.key_begin), dim};
  }
  TW_APART void add_odd_queries(const GradStep& s, const TileGradBuffers& b) const {
    const tw_args& a = h.args;
    for (int64_t first = 0; first < queries.rows; first += 32) {
      const uint32_t odd_q = queries.odd_q.at(first), odd_d_o = queries.odd_d_o.at(first);
      if (!(odd_q | odd_d_o)) continue;
      count_careful_tile();
      const SeenRows shown = seen(s, first);
      const int64_t row = queries.row + first;
      add_odd_rows<T>(keys.dv.from(at(s), 0), b.p.from(0, first / 32), odd_d_o, shown, rows_of(h.out(a.d_o, row, h.head), a.d_o, a.head_dim_v, first));
      add_odd_rows<T>(keys.dk.from(at(s), 0), b.ds.from(0, first / 32), odd_q, shown, rows_of(h.q(row), a.q, a.head_dim, first));
    }
  }
  TW_APART void mend_scores(const GradStep& s, const TileGradBuffers& b) const {
    const tw_args& a = h.args;
    const int64_t key = s.crop.key_begin;
    for (int64_t first = 0; first < queries.rows; first += 32) {
      const uint32_t k = keys.odd_k.at(at(s)), v = keys.odd_v.at(at(s)), q = queries.odd_q.at(first), d_o = queries.odd_d_o.at(first);
      if (!(k | v | q | d_o)) continue;
      count_careful_tile();
      const SeenRows shown = seen(s, first);
      const int64_t row = queries.row + first;
      if (k | q)
        mend_products<T>(b.s.from(0, first / L), k, q, shown, keys_of(s, h.k(key), a.k, a.head_dim), rows_of(h.q(row), a.q, a.head_dim, first));
      const bool infinite = mend_products<T>(b.dp.from(0, first / L), v, d_o, shown, keys_of(s, h.v(key), a.v, a.head_dim_v),
                                             rows_of(h.out(a.d_o, row, h.head), a.d_o, a.head_dim_v, first));
      if (T > 1 && infinite) splits = false;  // nor does dS
    }
  }
  int64_t steps(bool next) const {
    const int64_t dim = h.args.head_dim, dim_v = h.args.head_dim_v, columns = queries.columns;
    int64_t n = 0;
    if (next) n += product_steps<T>(2, columns, (dim + 31) / 32) + product_steps<T>(2, columns, (dim_v + 31) / 32);
    if (last.any) n += product_steps<T>(2, (dim_v + 15) / 16, columns / 2) + product_steps<T>(2, (dim + 15) / 16, columns / 2);
    return n;
  }
  // P and dS of a step that has S and dP.
  GradWeights<T> weights(const GradStep& s, const TileGradBuffers& b) const {
    const tw_args& a = h.args;
    const bool general = h.adjusts() || s.crop.partial || b.kept.base || queries.dead_rows, fused = T < 3 && queries.fused;
    float factor = score_factor(a);
    if (keys.odd_k.at(at(s)) | keys.odd_v.at(at(s)) || queries.odd_q.any || queries.odd_d_o.any) mend_scores(s, b);
    if (general) {
      finish_scores(b.s, queries.columns, factor, h, bands, s.x, s.crop, (vf)splat(kHiddenBits), b.cap.base ? &b.cap : nullptr);
      factor = 1.f;
      for (int64_t w = 0; b.kept.base && w < queries.columns; w++) {
        Crop part = s.crop;
        part.row += w * L;
        dropout_factors(floats(b.kept, 0, w), L, h, part, 1);
      }
    }
    const int64_t pieces = queries.columns / 2 * 16;
    ahead.share(s.left, pieces);
    return {queries, b, ahead, splat(fused ? factor * kLog2e : factor), s.pair, pieces, general, fused, a.dbias.data != nullptr};
  }
  void add_bias(const GradStep& s, const TileGradBuffers& b) const {
    for (int64_t w = 0; h.args.dbias.data && w * L < queries.rows; w++) {
      Crop part = s.crop;
      part.row += w * L;
      part.rows = min_of(s.crop.rows - w * L, (int64_t)L);
      add_bias_gradient(floats(b.dp, 0, w), L, h, part, 1);
    }
  }
  // `next`, or nothing, takes now's place.
  void advance(const GradStep& next) {
    if (now.any) {
      GradWeights<T> made = weights(now, buffers[turn]);
      Beside<GradWeights<T>> beside = {made, max_of(steps(next.any), (int64_t)1)};
      if (last.any) gradients(last, buffers[turn ^ 1], beside);
      if (next.any) scores(next, buffers[turn ^ 1], beside);
      while (made.w < queries.columns) made.next();
      add_bias(now, buffers[turn]);
    } else if (next.any) {
      Nothing nothing;
      scores(next, buffers[turn ^ 1], nothing);
    }
    last = now;
    now = next;
    turn ^= 1;
  }
  void add(const GradStep& step) {
    if constexpr (kOverlaps<T>) return advance(step);
    Nothing nothing;
    scores(step, buffers[0], nothing);
    GradWeights<T> made = weights(step, buffers[0]);
    while (made.w < queries.columns) made.next();
    add_bias(step, buffers[0]);
    gradients(step, buffers[0], nothing);
  }
  void finish() {
    Nothing nothing;
    if (now.any) advance({});
    if (last.any) gradients(last, buffers[turn ^ 1], nothing);
    last.any = false;
  }
};

// What is read after a block of rows of a head, of those that see the keys [key, key + keys): the block before it, or the last one of the next
// head, and its keys where they are others.
static void add_next_rows(Ahead& ahead, bool with_o, const Head& h, int64_t block, int64_t block_rows, int64_t first, int64_t last, int64_t key,
                          int64_t keys) {
  const tw_args& a = h.args;
  const bool more = block > first, same_batch = h.head + 1 < a.heads_q;
  if (!more && !same_batch && h.batch + 1 == a.batch) return;
  const Head next = more ? h : same_batch ? Head(a, h.batch, h.head + 1) : Head(a, h.batch + 1, 0);
  const int64_t row = (more ? block - 1 : last) * block_rows, rows = min_of(block_rows, a.seqlen_q - row);
  ahead.add(next.q(row), a.q.seq, rows, a.head_dim, a.dtype);
  ahead.add(next.out(a.d_o, row, next.head), a.d_o.seq, rows, a.head_dim_v, a.dtype);
  if (with_o) ahead.add(next.out(a.o, row, next.head), a.o.seq, rows, a.head_dim_v, a.dtype);
  if (next.kv_head != h.kv_head || next.batch != h.batch) ahead.add_keys(next, key, keys);
}

static void clear_dq(const TileBackward& plan, const Head& h, int64_t block) {
  memset(dq_cells(plan, h, block, nullptr).base, 0, (size_t)(kTileGradRows * round_up(plan.args.head_dim, 16)) * 4);
}

static void store_dq(const TileBackward& plan, const Head& h, int64_t block, float* local) {
  const tw_args& a = plan.args;
  const Cells dq = dq_cells(plan, h, block, local);
  for (int64_t w = 0; w < kTileColumns; w++) {
    const int64_t row = block * kTileGradRows + w * L, rows = min_of((int64_t)L, a.seqlen_q - row);
    if (rows <= 0) break;
    char* out = h.out(a.dq, row, h.head);
    if (a.dtype == TW_FP32) store_column<3>(out, a.dq.seq, floats(dq, 0, w), rows, a.head_dim, splat(a.scale));
    if (a.dtype == TW_BF16) store_column<1>(out, a.dq.seq, floats(dq, 0, w), rows, a.head_dim, splat(a.scale));
    if (a.dtype == TW_FP16) store_column<2>(out, a.dq.seq, floats(dq, 0, w), rows, a.head_dim, splat(a.scale));
  }
}

// What keys of a crop that were packed as zeros give to dQ.
template <int T>
static TW_APART void add_odd_keys_to_dq(const Cells& dq, const TileBackwardScratch<T>& scratch, const Head& h, const BandList& bands,
                                                         int64_t x, const Crop& all) {
  const tw_args& a = h.args;
  const TileQueries& queries = scratch.queries;
  for (int64_t key = all.key_begin; key < all.key_end; key += 32) {
    const uint32_t odd = scratch.keys.odd_k.at(key - scratch.keys.key);
    for (int64_t first = 0; odd && first < queries.rows; first += 32) {
      count_careful_tile();
      const Crop part = {queries.row + first, min_of((int64_t)32, queries.rows - first), key, key + 32, false};
      add_odd_keys<T>(dq.from(0, first / L), scratch.buffers[0].ds_keys.from((key - all.key_begin) / 2, first / L), odd,
                      SeenRows(bands, x, 1, part, key, queries.alive(first)),
                      {h.k(key), a.k.seq, min_of((int64_t)32, a.seqlen_k - key), a.head_dim});
    }
  }
}

// All the rows of one query head against a chunk, last rows first; see walk_queries in backward.h.
template <int T>
static void walk_tile_queries(const TileBackward& plan, TileBackwardScratch<T>& scratch, const Head& h, Turns& turns, int64_t first_step,
                              bool& splits) {
  const tw_args& a = plan.args;
  const TileKeys& keys = scratch.keys;
  const RowRange seen = rows_that_see(h.plane, keys.key, keys.key + keys.keys, a.seqlen_q);
  if (seen.begin >= seen.end) return;
  for (int64_t block = (seen.end - 1) / kTileGradRows; block >= seen.begin / kTileGradRows; block--) {
    const int64_t row = block * kTileGradRows, rows = min_of(kTileGradRows, a.seqlen_q - row), step = first_step + plan.row_blocks - 1 - block;
    const BandList bands = bands_at(h.plane, row);
    const Visits visits = visits_of(plan, h, block);
    const bool first = plan.alone && visits.first == keys.key / plan.chunk, last = plan.alone && visits.last == keys.key / plan.chunk;
    const int64_t last_key = min_of(keys.key + keys.keys, keys_seen(h, row, rows).end);
    Ahead ahead;
    add_next_rows(ahead, first, h, block, kTileGradRows, seen.begin / kTileGradRows, (seen.end - 1) / kTileGradRows, keys.key, keys.keys);
    bool loaded = false;
    for (int64_t key = keys.key; key < keys.key + keys.keys; key += plan.block) {
      const int64_t n = min_of(plan.block, keys.key + keys.keys - key);
      for (int64_t x = bands.begin; x < bands.end; x++) {
        const Crop all = tile_crop(bands, x, row, rows, key, n);
        if (all.empty()) continue;
        if (!loaded) {
          turns.publish(step);
          load_tile_queries<T>(scratch.queries, plan, h, row, first, scratch.finite, splits);
          if (first && !plan.local_dq) clear_dq(plan, h, block);
          loaded = true;
        }
        GradPipeline<T> pipeline = {h, keys, scratch.queries, bands, scratch.buffers, ahead, splits, {}, {}};
        for (int64_t from = all.key_begin; from < all.key_end; from += 32) {
          pipeline.add({key_group(bands, x, row, rows, from, min_of((int64_t)32, key + n - from)), x, (from - all.key_begin) / 2,
                        max_of((last_key - from) / 32, (int64_t)1), true});
        }
        pipeline.finish();
        turns.wait(step);
        matrix_product<T>(dq_cells(plan, h, block, scratch.dq), keys.k_columns.from(0, (all.key_begin - keys.key) / 32), scratch.buffers[0].ds_keys,
                          (a.head_dim + 15) / 16, scratch.queries.columns, (all.key_end - all.key_begin) / 32, true);
        if (keys.odd_k.any) add_odd_keys_to_dq<T>(dq_cells(plan, h, block, scratch.dq), scratch, h, bands, x, all);
      }
    }
    if (loaded) turns.publish(step + 1);
    if (last && !plan.local_dq) store_dq(plan, h, block, nullptr);
  }
}

// One chunk of keys, of the heads (and batches) of one group.
template <int T>
static void tile_backward_chunk(const TileBackward& plan, int64_t chunk, int64_t group, char* memory) {
  const tw_args& a = plan.args;
  Arena arena = {memory};
  TileBackwardScratch<T> scratch(arena, plan);
  const TileUnit unit;
  bool splits = true;
  Looked looked;
  const int64_t head_groups = a.heads_k / plan.head_step, per_kv = a.heads_q / a.heads_k;
  const int64_t batch0 = group / head_groups * plan.batch_step, head0 = group % head_groups * plan.head_step;
  const int64_t key = chunk * plan.chunk, n = min_of(plan.chunk, a.seqlen_k - key), padded = round_up(n, 32);
  Turns turns = {plan.turns, group, plan.groups, chunk, plan.chunks == 1 || plan.together > 0};
  TileKeys& keys = scratch.keys;
  keys.key = key;
  keys.keys = n;
  int64_t step = 0;
  for (int64_t batch = batch0; batch < batch0 + plan.batch_step; batch++)
    for (int64_t kv_head = head0; kv_head < head0 + plan.head_step; kv_head++) {
      const Head any(a, batch, kv_head * per_kv);
      const Rows<T> k = {any.k(key), a.k.seq, n, a.head_dim}, v = {any.v(key), a.v.seq, n, a.head_dim_v};
      const Rows<T> finite_k = pack_finite<T>(
          k, keys.odd_k, scratch.finite, splits, [&](const Rows<T>& in, Finite<T>& finite) { pack_rows<T>(keys.k, in, padded, finite); });
      pack_pairs_transposed<T>(keys.k_columns, finite_k, padded, looked);
      pack_finite<T>(v, keys.odd_v, scratch.finite, splits, [&](const Rows<T>& in, Finite<T>& finite) { pack_rows<T>(keys.v, in, padded, finite); });
      memset(keys.dk.base, 0, (size_t)(keys.dk.rows * round_up(a.head_dim, 16) * 4));
      memset(keys.dv.base, 0, (size_t)(keys.dv.rows * round_up(a.head_dim_v, 16) * 4));
      for (int64_t g = 0; g < per_kv; g++, step += plan.row_blocks) {
        const Head h(a, batch, kv_head * per_kv + g);
        if (plan.local_dq) memset(scratch.dq, 0, (size_t)(plan.row_blocks * kTileGradRows * round_up(a.head_dim, 16)) * 4);
        walk_tile_queries<T>(plan, scratch, h, turns, step, splits);
        for (int64_t block = 0; plan.local_dq && block < plan.row_blocks; block++) store_dq(plan, h, block, scratch.dq);
      }
      const auto store = a.wide ? store_cells<TW_FP32> : store_cells<kDtype<T>>;
      store(any.in_wide(a.dk, key, kv_head), a.dk.seq, keys.dk, n, a.head_dim, a.scale);
      store(any.in_wide(a.dv, key, kv_head), a.dv.seq, keys.dv, n, a.head_dim_v, 1.f);
    }
  turns.publish(INT64_MAX);
  if (!splits) __atomic_store_n(plan.splits, 0, __ATOMIC_RELAXED);
}

// One chunk of one group, or all of some groups; chunks are added to dQ in ascending order either way.
template <int T>
static void tile_backward_item(const void* context, int64_t item, char* memory) {
  const TileBackward& plan = *(const TileBackward*)context;
  if (plan.together == 0) return tile_backward_chunk<T>(plan, item / plan.groups, item % plan.groups, memory);
  for (int64_t chunk = 0; chunk < plan.chunks; chunk++)
    for (int64_t group = item * plan.together; group < (item + 1) * plan.together; group++) tile_backward_chunk<T>(plan, chunk, group, memory);
}

// LSE for one block of rows; delta, and dQ = 0, where no chunk is to find them.
template <int T>
static void prepare_rows(const void* context, int64_t item, char* memory) {
  const TileBackward& plan = *(const TileBackward*)context;
  const tw_args& a = plan.args;
  const int64_t block = item % plan.row_blocks, head = item / plan.row_blocks;
  const Head h(a, head / a.heads_q, head % a.heads_q);
  const int64_t first = block * kTileGradRows;
  if (plan.lse) lse_of_rows(plan.lse + h.statistics(first), h, first, min_of(kTileGradRows, a.seqlen_q - first));
  if (plan.alone && visits_of(plan, h, block).first >= 0) return;
  const TileUnit unit;
  bool splits = true;
  uint32_t odd_d_o = 0;
  OddRows odd = {&odd_d_o};
  Arena arena = {memory};
  const DeltaCells cells = delta_cells<T>(arena, a);
  const Cells d_o = bf16_cells<T>(arena, round_up(a.head_dim_v, 32) / 2, 2);
  char* scratch = (char*)arena.floats(32 * a.head_dim_v);
  const int64_t end = plan.delta ? min_of((block + 1) * kTileGradRows, a.seqlen_q) : 0;
  for (int64_t row = first; row < end; row += 32) {
    const int64_t rows = min_of((int64_t)32, a.seqlen_q - row);
    pack_finite<T>({h.out(a.d_o, row, h.head), a.d_o.seq, rows, a.head_dim_v}, odd, scratch, splits,
                   [&](const Rows<T>& in, Finite<T>& finite) { pack_rows_transposed<T>(d_o, in, 32, finite); });
    find_tile_delta<T>(plan.delta + h.statistics(row), cells, d_o, h, row, rows, odd.at(0), scratch, splits);
  }
  if (!plan.local_dq) clear_dq(plan, h, block);
  if (!splits) __atomic_store_n(plan.splits, 0, __ATOMIC_RELAXED);
}

static void finish_dq(const void* context, int64_t item, char*) {
  const TileBackward& plan = *(const TileBackward*)context;
  const int64_t head = item / plan.row_blocks, block = item % plan.row_blocks;
  const Head h(plan.args, head / plan.args.heads_q, head % plan.args.heads_q);
  if (!plan.alone || visits_of(plan, h, block).first < 0) store_dq(plan, h, block, nullptr);
}

static void tile_sink_gradient(const void* context, int64_t head, char*) {
  const TileBackward& plan = *(const TileBackward*)context;
  sum_sink_gradient(plan.args, plan.delta, head);
}

// See forward_on_tiles.
template <int T>
static int backward_on_tiles(const tw_args& a, int32_t* splits) {
  const TileBackward plan = plan_tile_backward<T>(a, splits);
  memset(plan.turns, 0, (size_t)(plan.chunks * plan.groups) * sizeof(int64_t));
  const int64_t blocks = a.batch * a.heads_q * plan.row_blocks;
  const tw_phase phases[4] = {
      {prepare_rows<T>, plan.delta || !plan.local_dq ? blocks : 0, false},
      {tile_backward_item<T>, plan.together ? plan.groups / plan.together : plan.chunks * plan.groups, plan.chunks > 1 && !plan.together},
      {finish_dq, plan.local_dq ? 0 : blocks, false},
      {tile_sink_gradient, a.dsink ? a.heads_q : 0, false},
  };
  Arena size = {nullptr}, rows_size = {nullptr};
  const TileBackwardScratch<T> measure(size, plan);
  (void)measure;
  delta_cells<T>(rows_size, a), bf16_cells<T>(rows_size, round_up(a.head_dim_v, 32) / 2, 2), rows_size.floats(32 * a.head_dim_v);
  return tw_run(phases, 4, useful_threads(a, 3), max_of(size.used, rows_size.used), &plan);
}

}  // namespace TW_NAMESPACE
