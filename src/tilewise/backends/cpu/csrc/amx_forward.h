// The forward on AMX: the arithmetic of forward.h, S^T = K Q^T and O^T = V^T P^T in tiles, on panels of two columns of 16 query rows.
//
// Scores are S[key][row] there too, so that P, bf16 pair by pair of keys, is at once the operand of the second product, and masks and score
// modifiers are the same code, a column at a time.
#pragma once
#include "ahead.h"
#include "amx_nonfinite.h"
#include "plan.h"
#include "scores.h"
#include "threads.h"

namespace TW_NAMESPACE {

constexpr int64_t kTileKeys = 128;   // most keys of a block
constexpr int64_t kTileRows = 32;    // query rows of a panel; divides TW_ROW_BLOCK
constexpr int64_t kMostPanels = 16;  // that share one packing of K and V

// A crop whose keys begin and end at multiples of 32, as blocks of keys do; what it has too many is hidden.
TW_INLINE Crop tile_crop(const BandList& list, int64_t x, int64_t row, int64_t rows, int64_t key, int64_t keys) {
  Crop c = crop(list, x, row, rows, key, keys, 1);
  if (c.empty()) return c;
  const int64_t begin = c.key_begin & ~(int64_t)31, end = round_up(c.key_end, 32);
  c.partial |= begin != c.key_begin || end != c.key_end;
  c.key_begin = begin;
  c.key_end = end;
  return c;
}

// The crop of bands [x, end) that are computed at once, and their number: those whose tiles of keys are no more together than one after another.
struct JointCrop {
  Crop crop;
  int64_t bands;
};
TW_INLINE JointCrop joint_crop(const BandList& list, int64_t x, int64_t row, int64_t rows, int64_t key, int64_t keys) {
  JointCrop all = {tile_crop(list, x, row, rows, key, keys), 1};
  Crop& c = all.crop;
  for (; !c.empty() && all.bands < kMostBands && x + all.bands < list.end; all.bands++) {
    const Crop more = tile_crop(list, x + all.bands, row, rows, key, keys);
    if (more.empty()) break;
    const int64_t begin = min_of(c.key_begin, more.key_begin), end = max_of(c.key_end, more.key_end);
    if (end - begin > c.key_end - c.key_begin + more.key_end - more.key_begin) break;
    c.key_begin = begin, c.key_end = end, c.partial = true;
  }
  return all;
}

// What masks and score modifiers make of a panel's scores, times `factor`: S as it goes into the softmax. s: C, cells are keys.
static void finish_scores(const Cells& s, int64_t columns, float factor, const Head& h, const BandList& bands, int64_t x, const Crop& c, vf hidden,
                          const Cells* cap, int64_t joint = 1) {
  const int64_t keys = c.key_end - c.key_begin;
  for (int64_t w = 0; w < columns; w++) {
    float* column = floats(s, 0, w);
    for (int64_t j = 0; j < keys; j++) store(column + j * L, load(column + j * L) * splat(factor));
    Crop part = c;
    part.row += w * L;
    part.rows = max_of(min_of(c.rows - w * L, (int64_t)L), (int64_t)0);
    if (part.rows == 0) {
      for (int64_t j = 0; j < keys; j++) store(column + j * L, hidden);
      continue;
    }
    if (h.adjusts()) adjust_scores(column, cap ? floats(*cap, 0, w) : nullptr, L, h, part, 1);
    if (joint > 1) hide_from_all(column, L, bands, x, joint, part, 1, hidden);
    else if (c.partial) hide(column, L, bands, x, part, 1, hidden);
  }
}

struct RowState {
  float m[kTileRows], l[kTileRows];  // maxima and sums
};

struct TilePanel {
  int64_t row, rows;
  Cells q, o;  // B; C, cells are head_dim_v
  RowState* state;
  uint32_t odd;  // rows of Q that were packed as zeros
};

// Scores of at most so much lose less to a fused 2^(scale S - center) than to their own rounding; larger ones, and fp32, have the rounded center
// subtracted from scores rounded alike, so that the largest comes out as exactly 0.
constexpr float kFusedScores = 65536.f;

// P = exp(scale S - center) of U keys, added up, and as pairs of keys; with dropout the sum is what it was before. Where Fused, scale and center have
// log2 e in them.
template <int T, int U, bool Fused>
TW_INLINE vf weigh_keys(const float* s, vf scale, vf center, const float* kept, const Cells& p, int64_t pair, int64_t column) {
  vf x[U], sum[U];
  TW_UNROLL for (int u = 0; u < U; u++) {
    if constexpr (Fused) {  // said, not left to the compiler, which may share the product with the other branch: bits would depend on who calls
      x[u] = (vf)_mm512_fmsub_ps((__m512)load(s + u * L), (__m512)scale, (__m512)center);
      continue;
    }
    x[u] = load(s + u * L) * scale;
    __asm__("" : "+v"(x[u]));  // rounded as the center was, so that the largest comes out as exactly 0
    x[u] = (x[u] - center) * splat(kLog2e);
  }
  power_each<T, U>(x);
  TW_UNROLL for (int u = 0; u < U; u++) sum[u] = x[u];
  TW_UNROLL for (int n = U / 2; n; n /= 2) TW_UNROLL for (int u = 0; u < n; u++) sum[u] += sum[u + n];
  if (kept) TW_UNROLL for (int u = 0; u < U; u++) x[u] *= load(kept + u * L);
  TW_UNROLL for (int u = 0; u < U; u += 2) store_words<T, false>(p.at(pair + u / 2, column), p.plane, x[u], x[u + 1]);
  return sum[0];
}

TW_INLINE vf largest_of(const float* s, int64_t keys) {
  vf top[4];
  TW_UNROLL for (int u = 0; u < 4; u++) top[u] = splat(-kInf);
  for (int64_t j = 0; j < keys; j += 8) TW_UNROLL for (int u = 0; u < 8; u++) top[u % 4] = maximum(top[u % 4], load(s + (j + u) * L));
  return maximum(maximum(top[0], top[1]), maximum(top[2], top[3]));
}

struct TileBuffers {
  Cells s, p;
  float* kept;  // factors of dropout, as s
};

// The online softmax of a panel against the keys of a crop, a column of rows at a time: begin() finds m, rest() makes P, end() gives l and rescales O;
// next() does a piece of rest(), eight keys. Each piece fetches some of what is read later.
template <int T>
struct Softmax {
  const TilePanel& panel;
  Cells p;
  Ahead& ahead;
  int64_t keys, dim_v;
  float factor;
  struct Column {
    float* s;
    const float* kept;
    vf scale, center, rescale, sum;
    bool fused;
  } column[2];
  int64_t pieces = 0, w_next = 0, j_next = 0;  // the piece that is next

  Softmax(const TilePanel& of, const TileBuffers& b, Ahead& later, int64_t left, int64_t n_keys, int64_t n_dim_v, float times, bool dropout)
      : panel(of), p(b.p), ahead(later), keys(n_keys), dim_v(n_dim_v), factor(times), pieces((of.rows + L - 1) / L * (n_keys / 8)) {
    for (int64_t w = 0; w < 2; w++) column[w].s = floats(b.s, 0, w), column[w].kept = dropout ? b.kept + w * b.s.rows * L : nullptr;
    ahead.share(left, pieces);
  }
  TW_MEMBER void begin(int64_t w) {
    Column& c = column[w];
    float *s = c.s, *m = panel.state->m + w * L, times = factor;
    const int64_t n = keys;
    if (times < 0.f) {
      for (int64_t j = 0; j < n; j++) store(s + j * L, load(s + j * L) * splat(times));
      times = 1.f;
    }
    const vf m_old = load(m), m_new = maximum(m_old, largest_of(s, n) * splat(times)), center = m_new == splat(-kInf) ? vf{} : m_new;
    store(m, m_new);
    c.fused = T < 3 && !any_lane((m_new > splat(kFusedScores)) | (m_new < splat(-kFusedScores)));
    c.scale = splat(c.fused ? times * kLog2e : times);
    c.center = c.fused ? center * splat(kLog2e) : center;
    c.rescale = power_of<T>((m_old - center) * splat(kLog2e));
    c.sum = vf{};
  }
  template <bool Fused>
  TW_MEMBER void weigh(int64_t w, int64_t begin, int64_t end) {
    const vf scale = column[w].scale, center = column[w].center;
    const float *s = column[w].s, *kept = column[w].kept;
    vf sum = column[w].sum;
    for (int64_t j = begin; j < end; j += 8) {
      ahead.piece();
      sum += weigh_keys<T, 8, Fused>(s + j * L, scale, center, kept ? kept + j * L : nullptr, p, j / 2, w);
    }
    column[w].sum = sum;
  }
  TW_MEMBER void next() {
    ahead.piece();
    Column& c = column[w_next];
    const float *s = c.s + j_next * L, *kept = c.kept ? c.kept + j_next * L : nullptr;
    c.sum += T < 3 && c.fused ? weigh_keys<T, 8, true>(s, c.scale, c.center, kept, p, j_next / 2, w_next)
                              : weigh_keys<T, 8, false>(s, c.scale, c.center, kept, p, j_next / 2, w_next);
    if ((j_next += 8) == keys) j_next = 0, w_next++;
  }
  TW_MEMBER void rest(int64_t w) {
    const int64_t from = w < w_next ? keys : w == w_next ? j_next : 0;
    if (T < 3 && column[w].fused) weigh<true>(w, from, keys);
    else weigh<false>(w, from, keys);
  }
  TW_MEMBER void end(int64_t w) {
    const vf rescale = column[w].rescale;
    float* l = panel.state->l + w * L;
    store(l, load(l) * rescale + column[w].sum);
    if (any_lane(rescale != splat(1.f)))
      for (int64_t c = 0; c < dim_v; c++) {
        float* o = floats(panel.o, c, w);
        store(o, load(o) * rescale);
      }
  }
};

// bf16 has too few products for its softmax to hide behind (measured: docs/cpu-notes.md).
template <int T>
constexpr bool kOverlaps = T > 1;

struct TileForward {
  const tw_args& args;
  int64_t panels, tiles, block;  // panels of a tile, tiles of a head, keys of a block
  int32_t* splits;               // 0 once a finite number did not
};

template <int T>
struct TileForwardScratch {
  Cells q, o, k, v;
  TileBuffers buffers[kOverlaps<T> ? 2 : 1];
  RowState* states;
  uint32_t* odd;   // of a block's K, then V
  char* finite;    // rows without those
  TileForwardScratch(Arena& arena, const TileForward& plan) {
    const int64_t dim = round_up(plan.args.head_dim, 32), dim_v = round_up(plan.args.head_dim_v, 16);
    q = bf16_cells<T>(arena, dim / 2, 2 * plan.panels);
    o = arena_cells(arena, dim_v, 2 * plan.panels, 1);
    k = bf16_cells<T>(arena, plan.block, dim / 32);
    v = bf16_cells<T>(arena, dim_v, plan.block / 32);
    for (TileBuffers& b : buffers) {
      b.s = arena_cells(arena, plan.block, 2, 1);
      b.p = bf16_cells<T>(arena, plan.block / 2, 2);
      b.kept = arena.floats(plan.args.dropout_rescale > 0 ? plan.block * 2 * L : 0);
    }
    states = (RowState*)arena.floats(plan.panels * (int64_t)(sizeof(RowState) / 4));
    odd = (uint32_t*)arena.floats(2 * kTileKeys / 32);
    finite = (char*)arena.floats(max_of(plan.block, kTileRows) * max_of(plan.args.head_dim, plan.args.head_dim_v));
  }
};

// The keys of a crop against a panel.
struct TileStep {
  const TilePanel* panel = nullptr;
  Cells k = {}, v = {};  // from the crop's first key on
  BandList bands = {};
  int64_t x = 0;
  Crop crop = {};
  int64_t joint = 1;  // bands from x on, whose crop it is
  int64_t left = 1;   // panels that these keys are still for, with this one
};

// Steps one after another, each in three: scores, softmax, values. Where it pays, while the softmax of one step goes on, the tiles multiply for the
// values of the step before and the scores of the next.
template <int T>
struct TilePipeline {
  const Head& h;
  const TileBuffers* buffers;  // in turns
  Ahead& ahead;
  TileStep last, now;          // last: wants its values added; now: has its scores
  int turn = 0;                // now's buffers
  int64_t key = 0;             // the block's first
  OddRows odd_k = {}, odd_v = {};

  int64_t columns(const TileStep& s) const { return (s.panel->rows + L - 1) / L; }
  int64_t keys(const TileStep& s) const { return s.crop.key_end - s.crop.key_begin; }
  int64_t dim_v() const { return round_up(h.args.head_dim_v, 16); }

  template <class Other>
  void scores(const TileStep& s, int to, Other& other) const {
    matrix_product<T>(buffers[to].s, s.k, s.panel->q, keys(s) / 16, columns(s), (h.args.head_dim + 31) / 32, false, other);
  }
  template <class Other>
  void values(const TileStep& s, int from, Other& other) const {
    matrix_product<T>(s.panel->o, s.v, buffers[from].p, dim_v() / 16, columns(s), keys(s) / 32, true, other);
    if (odd_v.any) add_odd_values(s, buffers[from].p);
  }
  Crop rows_of(const TileStep& s) const { return {s.panel->row, s.panel->rows, s.crop.key_begin, s.crop.key_end, false}; }
  // A crop's keys, 32 at a time, of K or V.
  Rows<T> group(const char* data, const tw_tensor& t, int64_t first, int64_t dim) const {
    return {data, t.seq, min_of((int64_t)32, h.args.seqlen_k - first), dim};
  }
  TW_APART void add_odd_values(const TileStep& s, const Cells& p) const {
    const tw_args& a = h.args;
    for (int64_t at = s.crop.key_begin; at < s.crop.key_end; at += 32) {
      const uint32_t odd = odd_v.at(at - key);
      if (!odd) continue;
      count_careful_tile();
      add_odd_keys<T>(s.panel->o, p.from((at - s.crop.key_begin) / 2, 0), odd, SeenRows(s.bands, s.x, s.joint, rows_of(s), at),
                      group(h.v(at), a.v, at, a.head_dim_v));
    }
  }
  TW_APART void mend_scores(const TileStep& s, const Cells& scores) const {
    const tw_args& a = h.args;
    for (int64_t at = s.crop.key_begin; at < s.crop.key_end; at += 32) {
      const uint32_t odd = odd_k.at(at - key);
      if (!(odd | s.panel->odd)) continue;
      count_careful_tile();
      mend_products<T>(scores.from(at - s.crop.key_begin, 0), odd, s.panel->odd, SeenRows(s.bands, s.x, s.joint, rows_of(s), at),
                       group(h.k(at), a.k, at, a.head_dim), {h.q(s.panel->row), a.q.seq, s.panel->rows, a.head_dim});
    }
  }
  int64_t steps(const TileStep* next) const {
    int64_t n = next ? product_steps<T>(keys(*next) / 16, columns(*next), (h.args.head_dim + 31) / 32) : 0;
    if (last.panel) n += product_steps<T>(dim_v() / 16, columns(last), keys(last) / 32);
    return n;
  }

  // The softmax of a step that has its scores.
  Softmax<T> softmax(const TileStep& s, const TileBuffers& b) const {
    const bool dropout = h.args.dropout_rescale > 0;
    float factor = score_factor(h.args);
    if (odd_k.any || s.panel->odd) mend_scores(s, b.s);
    if (h.adjusts() || s.crop.partial) {
      finish_scores(b.s, columns(s), factor, h, s.bands, s.x, s.crop, splat(-kInf), nullptr, s.joint);
      factor = 1.f;
    }
    for (int64_t w = 0; dropout && w < columns(s); w++) {
      Crop part = s.crop;
      part.row += w * L;
      dropout_factors(b.kept + w * b.s.rows * L, L, h, part, 1);
    }
    return {*s.panel, b, ahead, s.left, keys(s), dim_v(), factor, dropout};
  }
  // `next`, or nothing, takes now's place.
  void advance(const TileStep* next) {
    if (now.panel) {
      Softmax<T> weights = softmax(now, buffers[turn]);
      for (int64_t w = 0; w < columns(now); w++) weights.begin(w);
      Beside<Softmax<T>> beside = {weights, max_of(steps(next), (int64_t)1)};
      if (last.panel) values(last, turn ^ 1, beside);
      if (next) scores(*next, turn ^ 1, beside);
      for (int64_t w = 0; w < columns(now); w++) {
        weights.rest(w);
        weights.end(w);
      }
    } else if (next) {
      Nothing nothing;
      scores(*next, turn ^ 1, nothing);
    }
    last = now;
    now = next ? *next : TileStep{};
    turn ^= 1;
  }
  void add(const TileStep& step) {
    if constexpr (kOverlaps<T>) return advance(&step);
    Nothing nothing;
    scores(step, 0, nothing);
    Softmax<T> weights = softmax(step, buffers[0]);
    for (int64_t w = 0; w < columns(step); w++) {
      weights.begin(w);
      weights.rest(w);
      weights.end(w);
    }
    values(step, 0, nothing);
  }
  void finish() {
    Nothing nothing;
    if (now.panel) advance(nullptr);
    if (last.panel) values(last, turn ^ 1, nothing);
    last.panel = nullptr;
  }
};

// O / l and LSE, with the sink as one more logit, of a column of rows; see finish_panel in forward.h.
template <int T>
static void finish_column(const TilePanel& panel, int64_t w, const Head& h) {
  const tw_args& a = h.args;
  const int64_t row = panel.row + w * L, rows = min_of((int64_t)L, panel.rows - w * L);
  vf m = load(panel.state->m + w * L), l = load(panel.state->l + w * L), factor = splat(1.f);
  alignas(64) float lse[L], row_max[L];
  store(row_max, largest_score(m, l));
  const vi nothing = l == splat(0.f);
  for (int64_t c = 0; any_lane(nothing) && c < a.head_dim_v; c++) {  // 0 times NaN, where all scores are -inf
    float* o = floats(panel.o, c, w);
    store(o, nothing ? vf{} : load(o));
  }
  if (a.sink) {
    const vf sink = splat(a.sink[h.head]), m_all = maximum(sink, m), center = m_all == splat(-kInf) ? vf{} : m_all;
    factor = exp_of(m - center);
    l = l * factor + exp_of(sink - center);
    m = m_all;
  }
  store(lse, l == splat(0.f) ? splat(-kInf) : m + log_of(l));
  store_column<T>(h.out(a.o, row, h.head), a.o.seq, floats(panel.o, 0, w), rows, a.head_dim_v, l == splat(0.f) ? vf{} : factor / l);
  if (a.lse) memcpy(a.lse + h.statistics(row), lse, (size_t)rows * sizeof(float));
  if (a.row_max) memcpy(a.row_max + h.statistics(row), row_max, (size_t)rows * sizeof(float));
}

// A tile of query rows of one head, against all the keys that its bands show it.
template <int T>
static void tile_forward(const void* context, int64_t item, char* memory) {
  const TileForward& plan = *(const TileForward*)context;
  const tw_args& a = plan.args;
  Arena arena = {memory};
  const TileForwardScratch<T> scratch(arena, plan);
  const TileUnit unit;
  bool splits = true;
  const int64_t tile_rows = plan.panels * kTileRows, items = a.batch * a.heads_q * plan.tiles;
  const Tile tile = tile_of(a, item, plan.tiles, tile_rows);
  const Head h(a, tile.batch, tile.head);
  const SeenKeys seen = keys_seen(h, tile.row, tile.rows);
  const int64_t dim_v = round_up(a.head_dim_v, 16), panels = (tile.rows + kTileRows - 1) / kTileRows;
  TilePanel panel[kMostPanels];
  for (int64_t x = 0; x < panels; x++) {
    TilePanel& p = panel[x];
    const int64_t row = tile.row + x * kTileRows;
    p = {row, min_of(kTileRows, a.seqlen_q - row), scratch.q.from(0, 2 * x), scratch.o.from(0, 2 * x), scratch.states + x, 0};
    OddRows odd = {&p.odd};
    pack_finite<T>({h.q(row), a.q.seq, p.rows, a.head_dim}, odd, scratch.finite, splits,
                   [&](const Rows<T>& in, Finite<T>& finite) { pack_rows_transposed<T>(p.q, in, p.rows, finite); });
    memset(p.o.base, 0, (size_t)(2 * dim_v * kCell));
    for (int64_t i = 0; i < kTileRows; i++) p.state->m[i] = -kInf, p.state->l[i] = 0.f;
  }
  Ahead ahead;
  TilePipeline<T> pipeline = {h, scratch.buffers, ahead, {}, {}};
  for (int64_t key = seen.begin / plan.block * plan.block; key < seen.end; key += plan.block) {
    const int64_t keys = min_of(plan.block, a.seqlen_k - key);
    bool packed = false;
    ahead = {};
    const int64_t next = key + plan.block;
    if (next < seen.end) ahead.add_keys(h, next, min_of(plan.block, seen.end - next));
    else if (item + 1 < items) add_tile(ahead, a, tile_of(a, item + 1, plan.tiles, tile_rows), plan.block);
    for (int64_t x = 0; x < panels; x++) {
      const TilePanel& p = panel[x];
      const BandList bands = bands_at(h.plane, p.row);
      for (int64_t b = bands.begin, joint; b < bands.end; b += joint) {
        const JointCrop all = joint_crop(bands, b, p.row, p.rows, key, keys);
        const Crop& c = all.crop;
        joint = all.bands;
        if (c.empty()) continue;
        if (!packed) {
          pipeline.key = key;
          pipeline.odd_k = {scratch.odd}, pipeline.odd_v = {scratch.odd + kTileKeys / 32};
          pack_finite<T>({h.k(key), a.k.seq, keys, a.head_dim}, pipeline.odd_k, scratch.finite, splits,
                         [&](const Rows<T>& in, Finite<T>& finite) { pack_rows<T>(scratch.k, in, round_up(keys, 32), finite); });
          pack_finite<T>({h.v(key), a.v.seq, keys, a.head_dim_v}, pipeline.odd_v, scratch.finite, splits,
                         [&](const Rows<T>& in, Finite<T>& finite) { pack_pairs_transposed<T>(scratch.v, in, keys, finite); });
          packed = true;
        }
        pipeline.add({&p, scratch.k.from(c.key_begin - key, 0), scratch.v.from(0, (c.key_begin - key) / 32), bands, b, c, joint, panels - x});
      }
    }
    pipeline.finish();
  }
  for (int64_t x = 0; x < panels; x++)
    for (int64_t w = 0; w * L < panel[x].rows; w++) finish_column<T>(panel[x], w, h);
  if (!splits) __atomic_store_n(plan.splits, 0, __ATOMIC_RELAXED);
}

// How long `panels` panels a tile take, in passes of a panel over the keys: equal shares, and half of the longest tile, for which the last threads wait
// about so long; it is twice the average where masks make tiles uneven. Packing a head's keys and values takes kPacking passes.
static double span_of(const tw_args& a, int64_t all, int64_t panels) {
  constexpr double kPacking = 2;
  const double threads = (double)max_of((int64_t)a.threads, (int64_t)1), tiles = (double)(a.batch * a.heads_q * ((all + panels - 1) / panels));
  const double longest = kPacking + (double)panels * (shows_all(a) ? 1 : 2);
  return tiles * kPacking / threads + (1 - 1 / threads) * longest;
}

// Tiles of as many panels as there are, but enough tiles for the threads.
static TileForward plan_tiles(const tw_args& a, int32_t* splits) {
  const int64_t all = (a.seqlen_q + kTileRows - 1) / kTileRows, most = min_of(kMostPanels, max_of(all, (int64_t)1));
  const auto enough = [&](int64_t panels) { return a.threads <= 1 || a.batch * a.heads_q * ((all + panels - 1) / panels) >= 4 * a.threads; };
  int64_t panels = most;
  for (int64_t fewer = most - 1; fewer > 0 && !enough(fewer + 1); fewer--)
    if (span_of(a, all, fewer) < span_of(a, all, panels)) panels = fewer;
  return {a, panels, (all + panels - 1) / panels, even_blocks(a.seqlen_k, kTileKeys, 32), splits};
}

// A call that met a finite number that does not split into planes (`splits` says 0) is to be computed again by kernels that need none.
template <int T>
static int forward_on_tiles(const tw_args& a, int32_t* splits) {
  const TileForward plan = plan_tiles(a, splits);
  Arena size = {nullptr};
  const TileForwardScratch<T> measure(size, plan);
  (void)measure;
  const tw_phase phase = {tile_forward<T>, a.batch * a.heads_q * plan.tiles, false};
  return tw_run(&phase, 1, useful_threads(a), size.used, &plan);
}

}  // namespace TW_NAMESPACE
