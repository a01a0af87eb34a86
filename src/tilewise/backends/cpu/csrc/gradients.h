// One step of the backward: a block of query rows against a block of keys. backward.h walks over them.
//
//   S = K Q^T, P = exp(S - lse), dP = V dO^T, dS = P (dP - delta), dV += P dO, dK += dS Q, dQ += dS^T K
#pragma once
#include "forward.h"

namespace TW_NAMESPACE {

constexpr int64_t kQueryBlock = 2 * kPanel;  // rows between two turns; divides TW_ROW_BLOCK
static_assert(TW_ROW_BLOCK % kQueryBlock == 0, "a block of rows lies in one list of bands");

// Rows of a gradient, which a step adds to.
struct RowsF32 {
  float* data;
  int64_t stride;
  float* row(int64_t r) const { return data + r * stride; }
};
// Keys of one key/value head as operands, with their gradients.
struct KeyChunk {
  int64_t key, keys;
  Operand k, v;        // broadcast rows
  Operand k_vectors;   // vector rows
  RowsF32 dk, dv;      // keys x padded dims
  float dk_factor;     // of what is added to dk
  float* finite_scratch;
  Operand finite_k = {};  // k_vectors without the rows that are not finite
  NonFinite odd = {};     // rows of K

  // Whether a crop that hides pairs needs finite_k, which is made then.
  template <class Op>
  TW_APART bool needs_care(const Head& h, const Crop& c) {
    if (odd.count < 0) odd.look(h.k(key), h.args.k.seq, keys, h.args.head_dim, h.args.dtype);
    if (!odd.any_of(c.key_begin - key, c.key_end - key)) return false;
    if (!finite_k.words) finite_k = without<Op>(odd, finite_scratch, k_vectors, keys, round_up(h.args.head_dim, kPad));
    return true;
  }
};

// kQueryBlock rows of one query head as operands.
struct QueryBlock {
  int64_t row, rows;
  float *q, *d_o;      // panels
  Operand q_vectors, d_o_vectors;
  float *lse, *delta;  // lse is +inf where the row saw nothing, so that P = 0
  bool dead_rows;      // some row saw nothing
  float *finite_q_scratch, *finite_d_o_scratch;
  Operand finite_q = {}, finite_d_o = {};  // q_vectors and d_o_vectors without the rows that are not finite
  NonFinite odd_q = {}, odd_d_o = {};

  // Whether a step that hides pairs needs finite_q and finite_d_o, which are made then.
  template <class Op>
  TW_APART bool needs_care(const Head& h) {
    const tw_args& a = h.args;
    if (odd_q.count < 0) {
      odd_q.look(h.q(row), a.q.seq, rows, a.head_dim, a.dtype);
      odd_d_o.look(h.out(a.d_o, row, h.head), a.d_o.seq, rows, a.head_dim_v, a.dtype);
      if (odd_q.count + odd_d_o.count) {
        finite_q = without<Op>(odd_q, finite_q_scratch, q_vectors, rows, round_up(a.head_dim, kPad));
        finite_d_o = without<Op>(odd_d_o, finite_d_o_scratch, d_o_vectors, rows, round_up(a.head_dim_v, kPad));
      }
    }
    return odd_q.count + odd_d_o.count > 0;
  }
  // Of a panel, a bit each: the rows that saw anything; of those, the ones of `odd`.
  uint64_t alive(int panel) const {
    uint64_t bits = 0;
    for (int64_t i = panel * kPanel; i < min_of((panel + 1) * (int64_t)kPanel, rows); i++) bits |= (uint64_t)(lse[i] != kInf) << (i - panel * kPanel);
    return bits;
  }
  uint64_t alive(int panel, const NonFinite& odd) const {
    uint64_t bits = 0;
    for (int x = 0; x < odd.count; x++)
      if (odd.rows[x] / kPanel == panel) bits |= (uint64_t)1 << (odd.rows[x] % kPanel);
    return bits & alive(panel);
  }
};

// [key][kQueryBlock]: S then P, and dS; for Pairs also as bf16, P and dS paired along rows and dS along keys.
struct GradBuffers {
  float *p, *ds;
  float *p_rows, *ds_rows, *ds_keys;
  float *dropout, *cap;  // factors of dropout; 1 - tanh^2 of the softcap, then dS before it where the bias's gradient is wanted
};

// dP of a register tile becomes dS in its registers. General: masks, score modifiers, dropout.
template <class Op, int W, bool General>
struct GradTile {
  Operand v;
  const float* d_o;
  int64_t depth;
  const vf *lse, *delta;
  GradBuffers b;  // already at this tile's panel
  bool keep_uncapped;

  // fp32's is a function of its own: inlined several times into a large one, its loop loses registers to whatever else is there (fp32 6 % slower;
  // bf16, whose loops are half as long, is 2 to 4 % slower with it: AMD EPYC, 2026-11-25).
  template <int M>
  TW_INLINE void run(const GradTile& t, int64_t r) {
    if constexpr (Op::kPack == 1) run_apart<M>(t, r);
    else run_here<M>(t, r);
  }
  template <int M>
  static TW_APART void run_apart(const GradTile& t, int64_t r) { run_here<M>(t, r); }
  template <int M>
  TW_INLINE void run_here(const GradTile& t, int64_t r) {
    tile_product<Op, M, W>(t.v.words + r * t.v.stride, t.v.stride, 1, t.d_o, kPanel, t.depth, [&](vf(&acc)[M][W]) {
      TW_UNROLL for (int x = 0; x < M; x++) {
        const int64_t at = (r + x) * kQueryBlock;
        vf s[W], p[W];
        TW_UNROLL for (int w = 0; w < W; w++) s[w] = load(t.b.p + at + w * L);
        TW_UNROLL for (int w = 0; w < W; w++) p[w] = at_most_0(s[w] - t.lse[w]);
        exp_each<W>(p);
        TW_UNROLL for (int w = 0; w < W; w++) {
          if constexpr (General) {
            const vf kept = t.b.dropout ? load(t.b.dropout + at + w * L) : splat(1.f);
            const vi hidden = ((vi)s[w] == splat(kHiddenBits)) | (t.lse[w] == splat(kInf));  // not even a NaN in lse, delta or dP matters
            const vf ds = hidden ? vf{} : p[w] * (acc[x][w] * kept - t.delta[w]);
            p[w] = hidden ? vf{} : p[w] * kept;
            acc[x][w] = ds;
            if (t.b.cap) {
              acc[x][w] *= load(t.b.cap + at + w * L);
              if (t.keep_uncapped) store(t.b.cap + at + w * L, ds);
            }
          } else {
            acc[x][w] = p[w] * (acc[x][w] - t.delta[w]);
          }
          if (Op::kPack == 1 || General) {
            store(t.b.p + at + w * L, p[w]);
            store(t.b.ds + at + w * L, acc[x][w]);
          }
          if constexpr (Op::kPack == 2) {
            Op::store_halves(t.b.p_rows + (at + w * L) / 2, p[w]);
            Op::store_halves(t.b.ds_rows + (at + w * L) / 2, acc[x][w]);
          }
        }
      }
      if constexpr (Op::kPack == 2)
        TW_UNROLL for (int x = 0; x < M; x += 2) TW_UNROLL for (int w = 0; w < W; w++)
          store(t.b.ds_keys + (r + x) / 2 * kQueryBlock + w * L, Op::interleave(acc[x][w], acc[x + 1][w]));
    });
  }
};

// The softcap's derivative where the score is NaN: 0, as dS of a hidden pair is 0 times it, and that of others is NaN without it.
static TW_APART void clear_nan(float* cap, int64_t keys, int vectors) {
  for (int64_t j = 0; j < keys; j++)
    for (int w = 0; w < vectors; w++) {
      float* p = cap + j * kQueryBlock + w * L;
      const vf x = load(p);
      store(p, x == x ? x : vf{});
    }
}

// P and dS of a panel with W vectors of rows in use, for the keys of a crop; `first` is the crop's first key counted from the buffers' first.
template <class Op, int W>
static void grad_scores(const KeyChunk& keys, const QueryBlock& queries, int panel, const Head& h, const BandList& bands, int64_t x, const Crop& c,
                        int64_t first, const GradBuffers& buffers) {
  const tw_args& a = h.args;
  const int64_t at = first * kQueryBlock + panel * kPanel, n = c.key_end - c.key_begin;
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad);
  GradBuffers b = buffers;
  b.p += at, b.ds += at;
  b.p_rows += at / 2, b.ds_rows += at / 2, b.ds_keys += first / 2 * kQueryBlock + panel * kPanel;
  if (b.dropout) b.dropout += at;
  if (b.cap) b.cap += at;
  vf top[W], lse[W], delta[W];
  TW_UNROLL for (int w = 0; w < W; w++) {
    top[w] = vf{};
    lse[w] = load(queries.lse + panel * kPanel + w * L);
    delta[w] = load(queries.delta + panel * kPanel + w * L);
  }
  const int64_t offset = c.key_begin - keys.key;
  const int64_t depth = (a.head_dim + Op::kPack - 1) / Op::kPack, depth_v = (a.head_dim_v + Op::kPack - 1) / Op::kPack;
  Ahead ahead;  // of nothing
  for_row_tiles<Op, W>(n, ScoreTile<Op, W>{b.p, kQueryBlock, keys.k.from(offset), queries.q + panel * kPanel * dim, depth, score_factor(a), top, ahead});
  const bool general = h.adjusts() || c.partial || b.dropout;
  if (h.adjusts()) adjust_scores(b.p, b.cap, kQueryBlock, h, c, W);
  if (c.partial) hide(b.p, kQueryBlock, bands, x, c, W, (vf)splat(kHiddenBits));
  if (c.partial && b.cap) clear_nan(b.cap, n, W);
  if (b.dropout) dropout_factors(b.dropout, kQueryBlock, h, c, W);
  const float* d_o = queries.d_o + panel * kPanel * dim_v;
  const bool keep_uncapped = a.dbias.data && b.cap;
  if (general)
    for_row_tiles<Op, W>(n, GradTile<Op, W, true>{keys.v.from(offset), d_o, depth_v, lse, delta, b, keep_uncapped});
  else
    for_row_tiles<Op, W>(n, GradTile<Op, W, false>{keys.v.from(offset), d_o, depth_v, lse, delta, b, false});
  if (a.dbias.data) add_bias_gradient(keep_uncapped ? b.cap : b.ds, kQueryBlock, h, c, W);
}

// dV += P dO and dK += dS Q for keys [begin, end) of the buffers and the rows of panels [from, to).
template <class Op>
static void update_key_gradients(const tw_args& a, const KeyChunk& keys, const QueryBlock& queries, bool careful, int64_t offset, int64_t begin,
                                 int64_t end, int from, int to, const GradBuffers& b) {
  if (begin >= end) return;
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad), row = from * kPanel;
  const int64_t depth = (min_of(to * (int64_t)kPanel, queries.rows) - row + Op::kPack - 1) / Op::kPack;
  const int64_t ld = kQueryBlock / Op::kPack, at = begin * ld + row / Op::kPack;
  const float *p = (Op::kPack == 2 ? b.p_rows : b.p) + at, *ds = (Op::kPack == 2 ? b.ds_rows : b.ds) + at;
  const Operand &d_o = careful ? queries.finite_d_o : queries.d_o_vectors, &q = careful ? queries.finite_q : queries.q_vectors;
  update_rows<Op, Update::kAccumulate>(keys.dv.row(offset + begin), keys.dv.stride, end - begin, dim_v, p, ld, 1, d_o.from(row / Op::kPack), depth,
                                       nullptr, 1.f);
  update_rows<Op, Update::kAccumulate>(keys.dk.row(offset + begin), keys.dk.stride, end - begin, dim, ds, ld, 1, q.from(row / Op::kPack), depth, nullptr,
                                       keys.dk_factor);
}

// P or dS of a panel's row i and the key j of its crop, as update_key_gradients multiplies them.
template <class Op>
TW_INLINE float grad_weight(const float* words, int64_t first, int panel, int64_t i, int64_t j) {
  return Op::weight(words + (first + j) * (kQueryBlock / Op::kPack) + panel * kPanel / Op::kPack, 1, i);
}

// What rows of Q and dO that are not finite add to dK and dV.
template <class Op>
static TW_APART void add_odd_queries(const KeyChunk& keys, const QueryBlock& queries, int panel, const Head& h, const BandList& bands, int64_t x,
                                     const Crop& c, int64_t first, const GradBuffers& b) {
  count_careful_tile();
  const tw_args& a = h.args;
  const float *p = Op::kPack == 2 ? b.p_rows : b.p, *ds = Op::kPack == 2 ? b.ds_rows : b.ds;
  const int64_t key = c.key_begin - keys.key;
  add_rows_seen(keys.dv.row(key), keys.dv.stride, a.head_dim_v, a.dtype, queries.alive(panel, queries.odd_d_o), bands, x, c,
                [&](int64_t i, int64_t j) { return grad_weight<Op>(p, first, panel, i, j); },
                [&](int64_t i) { return h.out(a.d_o, c.row + i, h.head); });
  add_rows_seen(keys.dk.row(key), keys.dk.stride, a.head_dim, a.dtype, queries.alive(panel, queries.odd_q), bands, x, c,
                [&](int64_t i, int64_t j) { return keys.dk_factor * grad_weight<Op>(ds, first, panel, i, j); },
                [&](int64_t i) { return h.q(c.row + i); });
}

// What keys that are not finite add to dQ; ds: from the crop's first key and the panel's first row on.
template <class Op>
static TW_APART void add_odd_keys(const KeyChunk& keys, const QueryBlock& queries, int panel, const Head& h, const BandList& bands, int64_t x,
                                  const Crop& c, const float* ds, RowsF32 dq) {
  count_careful_tile();
  const tw_args& a = h.args;
  add_keys_seen(dq.data, dq.stride, a.head_dim, a.dtype, keys.odd, keys.key, bands, x, c, queries.alive(panel),
                [&](int64_t i, int64_t j) { return a.scale * Op::weight(ds + i, kQueryBlock, j); }, [&](int64_t j) { return h.k(c.key_begin + j); });
}

// One block of rows against one block of the chunk's keys, for one band.
template <class Op>
static void grad_step(KeyChunk& keys, QueryBlock& queries, const Head& h, const BandList& bands, int64_t x, int64_t key, int64_t n,
                      const GradBuffers& buffers, RowsF32 dq, Turns& turns, int64_t step) {
  const tw_args& a = h.args;
  const int panels = (int)((queries.rows + kPanel - 1) / kPanel);
  Crop c[2];
  int64_t begin[2] = {0, 0}, end[2] = {0, 0};  // of each panel's keys, counted from `key`
  bool partial = false;
  for (int p = 0; p < panels; p++) {
    const int64_t rows = min_of((int64_t)kPanel, queries.rows - p * kPanel);
    c[p] = crop(bands, x, queries.row + p * kPanel, rows, key, n, Op::kPack);
    if (c[p].empty()) continue;
    c[p].partial |= queries.dead_rows;
    partial |= c[p].partial;
    begin[p] = c[p].key_begin - key, end[p] = c[p].key_end - key;
    const int vectors = (int)((rows + L - 1) / L);
    if (vectors == 1) grad_scores<Op, 1>(keys, queries, p, h, bands, x, c[p], begin[p], buffers);
    if (vectors == 2) grad_scores<Op, 2>(keys, queries, p, h, bands, x, c[p], begin[p], buffers);
    if (vectors == 3) grad_scores<Op, 3>(keys, queries, p, h, bands, x, c[p], begin[p], buffers);
  }
  // Keys that both panels see take their rows in one go; the rest panel by panel.
  const bool careful = partial && queries.needs_care<Op>(h);
  const int64_t offset = key - keys.key, both_begin = max_of(begin[0], begin[1]), both_end = min_of(end[0], end[1]);
  const bool both = both_begin < both_end;
  if (both) update_key_gradients<Op>(a, keys, queries, careful, offset, both_begin, both_end, 0, 2, buffers);
  for (int p = 0; p < panels; p++) {
    update_key_gradients<Op>(a, keys, queries, careful, offset, begin[p], both ? both_begin : end[p], p, p + 1, buffers);
    if (both) update_key_gradients<Op>(a, keys, queries, careful, offset, both_end, end[p], p, p + 1, buffers);
  }
  for (int p = 0; p < panels; p++) {
    if (c[p].empty()) continue;
    if (careful) add_odd_queries<Op>(keys, queries, p, h, bands, x, c[p], begin[p], buffers);
    turns.wait(step);
    const bool careful_k = c[p].partial && keys.needs_care<Op>(h, c[p]);
    const Operand& k = careful_k ? keys.finite_k : keys.k_vectors;
    float* rows = dq.data + p * kPanel * dq.stride;
    const float* ds = (Op::kPack == 2 ? buffers.ds_keys : buffers.ds) + begin[p] / Op::kPack * kQueryBlock + p * kPanel;
    update_rows<Op, Update::kAccumulate>(rows, dq.stride, c[p].rows, round_up(a.head_dim, kPad), ds, 1, kQueryBlock,
                                         k.from((offset + begin[p]) / Op::kPack), (end[p] - begin[p]) / Op::kPack, nullptr, a.scale);
    if (careful_k) add_odd_keys<Op>(keys, queries, p, h, bands, x, c[p], ds, {rows, dq.stride});
  }
}

}  // namespace TW_NAMESPACE
