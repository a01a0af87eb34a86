// O and LSE: FlashAttention-2's forward (Dao, arXiv:2307.08691, Algorithm 1) on panels of query rows.
//
// A panel is kPanel query rows, one a lane, so that scores are S^T[key][row]: K is only broadcast, row maxima and sums are plain vector
// operations, and a mask is a lane compare. Per panel and block of keys: S = K Q^T; m' = max(m, max S); P = exp(S - m'); l = l exp(m - m') + sum P;
// O = O exp(m - m') + P^T V, with O as rows (lanes = head dimension). Where blocks of keys start depends on seqlen_k alone, so a row's
// result does not depend on how rows are shared out.
#pragma once
#include "ahead.h"
#include "nonfinite.h"
#include "plan.h"
#include "products.h"
#include "scores.h"

namespace TW_NAMESPACE {

constexpr int64_t kKeyBlock = 128;  // most keys of a block

// One block of keys as operands, loaded when first needed.
template <class Op>
struct KeyBlock {
  const Head& head;
  float *k_scratch, *v_scratch, *finite_scratch;
  int64_t key = 0, keys = 0;
  bool loaded = false;
  Operand k = {}, v = {}, finite = {};
  NonFinite odd = {};  // rows of V

  void move_to(int64_t first, int64_t most) {
    key = first;
    keys = min_of(most, head.args.seqlen_k - first);
    loaded = false;
    finite = {};
    odd.count = -1;
  }
  void load() {
    if (loaded) return;
    loaded = true;
    const tw_args& a = head.args;
    k = Op::broadcast_rows(k_scratch, head.k(key), a.k.seq, keys, a.head_dim, a.dtype);
    v = Op::vector_rows(v_scratch, head.v(key), a.v.seq, keys, a.head_dim_v, a.dtype, a.seqlen_q <= kPanel);
  }
  // Whether a crop that hides pairs needs finite_v.
  bool needs_care(const Crop& c) {
    if (odd.count < 0) odd.look(head.v(key), head.args.v.seq, keys, head.args.head_dim_v, head.args.dtype);
    return odd.any_of(c.key_begin - key, c.key_end - key);
  }
  const Operand& finite_v() {
    if (!finite.words) finite = without<Op>(odd, finite_scratch, v, keys, round_up(head.args.head_dim_v, kPad));
    return finite;
  }
};

struct Panel {
  int64_t row, rows;
  float *q, *o, *m, *l;  // q: panel operand; o: rows x padded head_dim_v; m, l: row maxima and sums
};

// S[key][row] of a register tile, and the running maximum of each row; each tile fetches some of what is read later.
template <class Op, int W>
struct ScoreTile {
  float* s;
  int64_t lds;
  Operand k;
  const float* q;
  int64_t depth;
  float factor;
  vf* top;
  Ahead& ahead;
  template <int M>
  TW_INLINE void run(const ScoreTile& t, int64_t r) {
    t.ahead.piece();
    tile_product<Op, M, W>(t.k.words + r * t.k.stride, t.k.stride, 1, t.q, kPanel, t.depth, [&](vf(&acc)[M][W]) {
      TW_UNROLL for (int x = 0; x < M; x++) TW_UNROLL for (int w = 0; w < W; w++) {
        const vf s = acc[x][w] * t.factor;
        store(t.s + (r + x) * t.lds + w * L, s);
        t.top[w] = maximum(t.top[w], s);
      }
    });
  }
};

template <int W>
TW_INLINE void row_maxima(const float* s, int64_t keys, vf* top) {
  TW_UNROLL for (int w = 0; w < W; w++) top[w] = splat(-kInf);
  for (int64_t j = 0; j < keys; j++) TW_UNROLL for (int w = 0; w < W; w++) top[w] = maximum(top[w], load(s + j * kPanel + w * L));
}

// P = exp(S - center) for R keys, added to sum; to `pairs` as interleaved bf16, or in place.
template <class Op, int W, int R, bool InPlace>
TW_INLINE void exp_keys(float* s, float* pairs, const vf* center, vf* sum) {
  vf x[R * W];
  TW_UNROLL for (int u = 0; u < R * W; u++) x[u] = load(s + u / W * kPanel + u % W * L) - center[u % W];
  exp_each<R * W>(x);
  TW_UNROLL for (int u = 0; u < R * W; u++) sum[u % W] += x[u];
  if constexpr (InPlace) {
    TW_UNROLL for (int u = 0; u < R * W; u++) store(s + u / W * kPanel + u % W * L, x[u]);
  } else {
    TW_UNROLL for (int w = 0; w < W; w++) store(pairs + w * L, Op::interleave(x[w], x[W + w]));
  }
}

// Row sums are taken 16 keys at a time and then added up: a hundred additions to one number would cost LSE half a decimal.
template <class Op, int W, bool InPlace>
TW_INLINE void exp_block(float* s, float* pairs, int64_t keys, const vf* center, vf* sum) {
  constexpr int R = L == 16 ? 2 : 1;  // keys in flight: what 32, or 16, registers hold
  for (int64_t j = 0; j < keys;) {
    const int64_t end = min_of(j + 16, keys);
    vf part[W];
    TW_UNROLL for (int w = 0; w < W; w++) part[w] = vf{};
    for (; j + R <= end; j += R) exp_keys<Op, W, R, InPlace>(s + j * kPanel, pairs + j / 2 * kPanel, center, part);
    if constexpr (InPlace)
      for (; j < end; j++) exp_keys<Op, W, 1, true>(s + j * kPanel, pairs, center, part);
    TW_UNROLL for (int w = 0; w < W; w++) sum[w] += part[w];
  }
}

struct ForwardBuffers {
  float *s, *pairs, *factors;
};

// What keys whose values are not finite add to O.
template <class Op>
static TW_APART void add_odd_values(const Panel& p, const Head& h, const KeyBlock<Op>& block, const BandList& bands, int64_t x, const Crop& c,
                                    const float* weights) {
  count_careful_tile();
  const tw_args& a = h.args;
  add_keys_seen(p.o, round_up(a.head_dim_v, kPad), a.head_dim_v, a.dtype, block.odd, block.key, bands, x, c, ~(uint64_t)0,
                [&](int64_t i, int64_t j) { return Op::weight(weights + i, kPanel, j); }, [&](int64_t j) { return h.v(c.key_begin + j); });
}

// One online-softmax step: a panel with W vectors of rows in use, against the keys of a crop, which `left` panels want, with this one.
template <class Op, int W>
static void forward_step(const Panel& p, const Head& h, KeyBlock<Op>& block, const BandList& bands, int64_t x, const Crop& c,
                         const ForwardBuffers& buffer, Ahead& ahead, int64_t left) {
  const tw_args& a = h.args;
  block.load();
  const int64_t first = c.key_begin - block.key, keys = c.key_end - c.key_begin, depth = (a.head_dim + Op::kPack - 1) / Op::kPack;
  float* s = buffer.s;
  ahead.share(left, max_of(keys / tile_rows(W), (int64_t)1));
  vf top[W];
  TW_UNROLL for (int w = 0; w < W; w++) top[w] = splat(-kInf);
  for_row_tiles<Op, W>(keys, ScoreTile<Op, W>{s, kPanel, block.k.from(first), p.q, depth, score_factor(a), top, ahead});
  if (h.adjusts()) adjust_scores(s, nullptr, kPanel, h, c, W);
  if (c.partial) hide(s, kPanel, bands, x, c, W, splat(-kInf));
  if (h.adjusts() || c.partial) row_maxima<W>(s, keys, top);

  vf center[W], rescale[W], sum[W];
  alignas(64) float rescale_rows[kPanel];
  TW_UNROLL for (int w = 0; w < W; w++) {
    const vf m = load(p.m + w * L), m_new = maximum(m, top[w]);
    center[w] = m_new == splat(-kInf) ? vf{} : m_new;
    rescale[w] = exp_of(m - center[w]);
    sum[w] = vf{};
    store(p.m + w * L, m_new);
    store(rescale_rows + w * L, rescale[w]);
  }
  const bool careful = c.partial && block.needs_care(c), dropout = a.dropout_rescale > 0;
  const float* weights = s;
  if (Op::kPack == 2 && !dropout) {
    exp_block<Op, W, Op::kPack == 1>(s, buffer.pairs, keys, center, sum);
    weights = buffer.pairs;
  } else {
    exp_block<Op, W, true>(s, nullptr, keys, center, sum);
    if (dropout) {
      dropout_factors(buffer.factors, kPanel, h, c, W);
      for (int64_t j = 0; j < keys; j++)
        TW_UNROLL for (int w = 0; w < W; w++) {
          float* q = s + j * kPanel + w * L;
          store(q, load(q) * load(buffer.factors + j * kPanel + w * L));
        }
    }
    if constexpr (Op::kPack == 2) {
      for (int64_t j = 0; j < keys; j += 2)
        TW_UNROLL for (int w = 0; w < W; w++)
          store(buffer.pairs + j / 2 * kPanel + w * L, Op::interleave(load(s + j * kPanel + w * L), load(s + (j + 1) * kPanel + w * L)));
      weights = buffer.pairs;
    }
  }
  TW_UNROLL for (int w = 0; w < W; w++) store(p.l + w * L, load(p.l + w * L) * rescale[w] + sum[w]);
  const int64_t columns = round_up(a.head_dim_v, kPad);
  const Operand& v = careful ? block.finite_v() : block.v;
  update_rows<Op, Update::kRescale>(p.o, columns, p.rows, columns, weights, 1, kPanel, v.from(first / Op::kPack), keys / Op::kPack, rescale_rows, 1.f);
  if (careful) add_odd_values<Op>(p, h, block, bands, x, c, weights);
}

// O / l, with the sink as one more logit; lse = m + log l. Rows that saw nothing: O = 0, lse = -inf (the sink, if any).
static void finish_panel(const Panel& p, const Head& h) {
  const tw_args& a = h.args;
  const int64_t dim_v = round_up(a.head_dim_v, kPad);
  alignas(64) float factors[kPanel], lse[kPanel], row_max[kPanel];
  for (int64_t r = 0; r < p.rows; r++)
    if (p.l[r] == 0.f) memset(p.o + r * dim_v, 0, (size_t)dim_v * 4);  // 0 times NaN, where all scores are -inf
  for (int w = 0; w < kPanelVectors; w++) {
    vf m = load(p.m + w * L), l = load(p.l + w * L), factor = splat(1.f);
    store(row_max + w * L, largest_score(m, l));
    if (a.sink) {
      const vf sink = splat(a.sink[h.head]), m_all = maximum(sink, m), center = m_all == splat(-kInf) ? vf{} : m_all;
      factor = exp_of(m - center);
      l = l * factor + exp_of(sink - center);
      m = m_all;
    }
    store(factors + w * L, l == splat(0.f) ? vf{} : factor / l);
    store(lse + w * L, l == splat(0.f) ? splat(-kInf) : m + log_of(l));
  }
  store_rows(h.out(a.o, p.row, h.head), a.o.seq, p.o, dim_v, p.rows, a.head_dim_v, factors, 1, a.dtype);
  if (a.lse) memcpy(a.lse + h.statistics(p.row), lse, (size_t)p.rows * sizeof(float));
  if (a.row_max) memcpy(a.row_max + h.statistics(p.row), row_max, (size_t)p.rows * sizeof(float));
}

constexpr int kMaxPanels = 8;

struct ForwardPlan {
  const tw_args& args;
  int64_t panels;  // in a tile
  int64_t tiles;   // of a head
  int64_t block;   // keys
};

// Tiles of as many panels as share one pass over K and V and stay in the L2 cache, but enough tiles for the threads.
static ForwardPlan plan_forward(const tw_args& a) {
  const int64_t all = (a.seqlen_q + kPanel - 1) / kPanel;
  const int64_t panel_bytes = kPanel * (round_up(a.head_dim, kPad) + round_up(a.head_dim_v, kPad)) * 4;
  int64_t panels = max_of(min_of((int64_t)kMaxPanels, (int64_t)(400 << 10) / panel_bytes), (int64_t)1);
  while (panels > 1 && a.threads > 1 && a.batch * a.heads_q * ((all + panels - 1) / panels) < 4 * a.threads) panels--;
  return {a, panels, (all + panels - 1) / panels, even_blocks(a.seqlen_k, kKeyBlock)};
}

template <class Op>
struct ForwardScratch {
  ForwardBuffers buffers;
  float *k, *v, *q, *o, *m, *l, *finite_v;
  ForwardScratch(Arena& arena, const ForwardPlan& plan) {
    const int64_t dim = round_up(plan.args.head_dim, kPad), dim_v = round_up(plan.args.head_dim_v, kPad);
    q = arena.floats(plan.panels * kPanel * dim);
    o = arena.floats(plan.panels * kPanel * dim_v);
    m = arena.floats(plan.panels * kPanel);
    l = arena.floats(plan.panels * kPanel);
    k = arena.floats(kKeyBlock * dim);
    v = arena.floats(kKeyBlock * dim_v);
    buffers.s = arena.floats(kKeyBlock * kPanel);
    buffers.pairs = arena.floats(kKeyBlock * kPanel / 2);
    buffers.factors = arena.floats(plan.args.dropout_rescale > 0 ? kKeyBlock * kPanel : 0);
    finite_v = arena.floats(kKeyBlock * dim_v);
  }
};

// A tile of query rows of one head, against all the keys that its bands show it.
template <class Op>
static void forward_tile(const void* context, int64_t item, char* memory) {
  const ForwardPlan& plan = *(const ForwardPlan*)context;
  const tw_args& a = plan.args;
  Arena arena = {memory};
  const ForwardScratch<Op> scratch(arena, plan);
  const int64_t tile_rows = plan.panels * kPanel, items = a.batch * a.heads_q * plan.tiles;
  const Tile tile = tile_of(a, item, plan.tiles, tile_rows);
  const Head h(a, tile.batch, tile.head);
  const SeenKeys seen = keys_seen(h, tile.row, tile.rows);
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad), panels = (tile.rows + kPanel - 1) / kPanel;
  Panel panel[kMaxPanels];
  for (int64_t x = 0; x < panels; x++) {
    Panel& p = panel[x];
    const int64_t row = tile.row + x * kPanel;
    p = {row, min_of((int64_t)kPanel, a.seqlen_q - row), scratch.q + x * kPanel * dim, scratch.o + x * kPanel * dim_v, scratch.m + x * kPanel,
         scratch.l + x * kPanel};
    Op::panel(p.q, h.q(row), a.q.seq, p.rows, a.head_dim, a.dtype);
    memset(p.o, 0, (size_t)(p.rows * dim_v) * 4);
    memset(p.l, 0, kPanel * 4);
    for (int i = 0; i < kPanel; i++) p.m[i] = -kInf;
  }
  KeyBlock<Op> block = {h, scratch.k, scratch.v, scratch.finite_v};
  for (int64_t key = seen.begin / plan.block * plan.block; key < seen.end; key += plan.block) {
    block.move_to(key, plan.block);
    Ahead ahead;
    const int64_t next = key + plan.block;
    if (next < seen.end) ahead.add_keys(h, next, min_of(plan.block, seen.end - next));
    else if (item + 1 < items) add_tile(ahead, a, tile_of(a, item + 1, plan.tiles, tile_rows), plan.block);
    for (int64_t x = 0; x < panels; x++) {
      const Panel& p = panel[x];
      const BandList bands = bands_at(h.plane, p.row);
      for (int64_t b = bands.begin; b < bands.end; b++) {
        const Crop c = crop(bands, b, p.row, p.rows, key, block.keys, Op::kPack);
        if (c.empty()) continue;
        const int vectors = (int)((p.rows + L - 1) / L);
        if (vectors == 1) forward_step<Op, 1>(p, h, block, bands, b, c, scratch.buffers, ahead, panels - x);
        if (vectors == 2) forward_step<Op, 2>(p, h, block, bands, b, c, scratch.buffers, ahead, panels - x);
        if (vectors == 3) forward_step<Op, 3>(p, h, block, bands, b, c, scratch.buffers, ahead, panels - x);
      }
    }
  }
  for (int64_t x = 0; x < panels; x++) finish_panel(panel[x], h);
}

template <class Op>
static int forward(const tw_args& a) {
  const ForwardPlan plan = plan_forward(a);
  Arena size = {nullptr};
  ForwardScratch<Op> measure(size, plan);
  (void)measure;
  const tw_phase phase = {forward_tile<Op>, a.batch * a.heads_q * plan.tiles, false};
  return tw_run(&phase, 1, useful_threads(a), size.used, &plan);
}

}  // namespace TW_NAMESPACE
