// A few queries against many keys: every key and value is read once for the query rows of its head, and the keys are split over threads.
//
// The rows of a key/value head are its group's heads times seqlen_q. Lanes = head dimension here: memory is the limit, and a panel's lanes would be
// empty. A split holds kSplit keys whatever the number of threads; whoever finishes a head's last split merges them in order (Flash-Decoding):
// O = sum_s exp(m_s - m) O_s / sum_s exp(m_s - m) l_s.
#pragma once
#include "forward.h"

namespace TW_NAMESPACE {

constexpr int64_t kSplit = 1024, kDecodeKeys = 128;  // keys of a split; of a block, whose scores are softmaxed together
constexpr int kDecodeRows = 4;                       // rows that share a pass over a block

struct DecodePlan {
  const tw_args& args;
  int64_t rows, splits;
  int64_t heads;        // key/value heads of one item
  int64_t* unfinished;  // (batch, heads_k): splits
  float* m;             // (batch, heads_k, splits, rows); l likewise; o with padded head_dim_v
  float *l, *o;
  int64_t bytes;
};

static DecodePlan plan_decode(const tw_args& a) {
  const int64_t splits = max_of((a.seqlen_k + kSplit - 1) / kSplit, (int64_t)1);
  DecodePlan p = {a, a.heads_q / a.heads_k * a.seqlen_q, splits, 1, nullptr, nullptr, nullptr, nullptr, 0};
  // Where a key's heads lie side by side they are read together, as long as every thread has something to do.
  if (a.k.head < a.k.seq) p.heads = a.heads_k;
  while (p.heads % 2 == 0 && a.batch * p.splits * (a.heads_k / p.heads) < 4 * a.threads) p.heads /= 2;
  const int64_t heads = a.batch * a.heads_k, parts = heads * p.splits * p.rows;
  Arena arena = {(char*)a.workspace};
  p.unfinished = (int64_t*)arena.floats(2 * heads);
  p.m = arena.floats(parts);
  p.l = arena.floats(parts);
  p.o = arena.floats(parts * round_up(a.head_dim_v, kPad));
  p.bytes = (int64_t)arena.used;
  return p;
}

// Query row r of a key/value head.
TW_INLINE Head decode_head(const tw_args& a, int64_t batch, int64_t kv_head, int64_t r) {
  return Head(a, batch, kv_head * (a.heads_q / a.heads_k) + r / a.seqlen_q);
}

struct KeyRange {
  int64_t begin, end;
};
TW_INLINE KeyRange keys_seen(const Band& b, int64_t row, int64_t begin, int64_t end) {
  if (row < b.q0 || row >= b.q1) return {begin, begin};
  return {max_of(begin, max_of(b.k0, row + b.lo)), min_of(end, min_of(b.k1, row + b.hi + 1))};
}

// Where the keys and values of a block lie, wherever their pages are: offsets in bytes, the same for every head.
struct KeyRows {
  int64_t keys = 0;
  int64_t k[kDecodeKeys], v[kDecodeKeys];
  void locate(const tw_args& a, int64_t batch, int64_t key, int64_t n) {
    const int64_t size = element_bytes(a.dtype);
    keys = n;
    for (int64_t j = 0; j < keys; j++) {
      const int64_t at = key + j;
      const int64_t slab = a.page_table ? a.page_table[batch * a.page_table_stride + at / a.page_size] : batch;
      const int64_t slot = a.page_table ? at % a.page_size : at;
      k[j] = (slab * a.k.batch + slot * a.k.seq) * size;
      v[j] = (slab * a.v.batch + slot * a.v.seq) * size;
    }
  }
};

// Rows to compute with, and rows that are wanted next: fetched meanwhile, because a short piece of every row is no stream that hardware follows.
struct RowList {
  const char* base;
  const int64_t* offsets;
  const char* next_base = nullptr;
  const int64_t* next_offsets = nullptr;
  int64_t next = 0, bytes = 0;
  const char* operator[](int64_t j) const { return base + offsets[j]; }
  TW_INLINE void fetch(const RowList& list, int64_t j) {
    if (j < list.next)
      for (int64_t b = 0; b < list.bytes; b += 64) __builtin_prefetch(list.next_base + list.next_offsets[j] + b, 0, 2);
  }
};

// s[r][j] = q[r] . k[j] for R rows and kDecodeKeys keys (rows beyond `keys` are left alone).
template <int DT, int R>
static void dot_rows(float* s, const float* q, const RowList& k, int64_t keys, int64_t dim) {
  constexpr int N = kColumnVectors;  // keys at once, so that a piece of q serves N of them
  const int64_t dim_padded = round_up(dim, kPad), whole = dim / L * L;
  for (int64_t j0 = 0; j0 < keys; j0 += L) {
    vf sums[R][L / N];
    TW_UNROLL for (int x = 0; x < L; x += N) {
      vf acc[R][N];
      const char* rows[N];
      TW_UNROLL for (int n = 0; n < N; n++) {
        rows[n] = k[min_of(j0 + x + n, keys - 1)];
        RowList::fetch(k, j0 + x + n);
        TW_UNROLL for (int r = 0; r < R; r++) acc[r][n] = vf{};
      }
      for (int64_t c = 0; c < dim; c += L) {
        vf y[N];
        TW_UNROLL for (int n = 0; n < N; n++)
          y[n] = c < whole ? load_elements<DT>(element(rows[n], c, DT)) : load_first<DT>(element(rows[n], c, DT), dim - c);
        TW_UNROLL for (int r = 0; r < R; r++) {
          const vf z = load(q + r * dim_padded + c);
          TW_UNROLL for (int n = 0; n < N; n++) acc[r][n] += z * y[n];
        }
      }
      TW_UNROLL for (int r = 0; r < R; r++) {
        fold<1, N>(acc[r]);
        sums[r][x / N] = acc[r][0];
      }
    }
    TW_UNROLL for (int r = 0; r < R; r++) {
      fold<N, L / N>(sums[r]);
      store(s + r * kDecodeKeys + j0, sums[r][0]);
    }
  }
}

// o[r] += sum_j p[r][j] v[j]
template <int DT, int R>
static void add_values(float* o, const float* p, const RowList& v, int64_t keys, int64_t dim) {
  constexpr int N = kColumnVectors;
  const int64_t dim_padded = round_up(dim, kPad);
  for (int64_t c = 0; c < dim; c += N * L) {
    vf acc[R][N] = {};
    const int vectors = (int)min_of((dim - c + L - 1) / L, (int64_t)N);
    if (dim - c >= N * L) {
      for (int64_t j = 0; j < keys; j++) {
        vf y[N];
        if (c == 0) RowList::fetch(v, j);
        TW_UNROLL for (int n = 0; n < N; n++) y[n] = load_elements<DT>(element(v[j], c + n * L, DT));
        TW_UNROLL for (int r = 0; r < R; r++) TW_UNROLL for (int n = 0; n < N; n++) acc[r][n] += splat(p[r * kDecodeKeys + j]) * y[n];
      }
    } else {
      for (int64_t j = 0; j < keys; j++)
        TW_UNROLL for (int n = 0; n < N; n++) {
          if (n >= vectors) continue;
          const vf y = load_first<DT>(element(v[j], c + n * L, DT), dim - c - n * L);
          TW_UNROLL for (int r = 0; r < R; r++) acc[r][n] += splat(p[r * kDecodeKeys + j]) * y;
        }
    }
    TW_UNROLL for (int r = 0; r < R; r++) TW_UNROLL for (int n = 0; n < N; n++) {
      if (n >= vectors) continue;
      float* out = o + r * dim_padded + c + n * L;
      store(out, load(out) + acc[r][n]);
    }
  }
}

// Which keys of a block a row sees; false where it sees them all, and then `seen` is not written.
static bool find_hidden(uint8_t* seen, const Head& h, int64_t row, int64_t key, int64_t keys) {
  const BandList bands = bands_at(h.plane, row);
  bool listed = false;
  for (int64_t x = bands.begin; x < bands.end; x++) {
    const KeyRange r = keys_seen(bands[x], row, key, key + keys);
    if (r.begin >= r.end) continue;
    if (r.end - r.begin == keys) return false;
    if (!listed) memset(seen, 0, kDecodeKeys);
    listed = true;
    memset(seen + (r.begin - key), 1, (size_t)(r.end - r.begin));
  }
  if (!listed) memset(seen, 0, kDecodeKeys);
  return true;
}

// Scores of one row against a block: scale, softcap, bias, ALiBi; what is hidden (seen: null where nothing is) becomes -inf.
static void finish_scores(float* s, const uint8_t* seen, const Head& h, int64_t row, int64_t key, int64_t keys) {
  const tw_args& a = h.args;
  const int64_t diagonal = a.diagonal ? a.diagonal[row] : (a.seqlens_k ? a.seqlens_k[h.batch] : a.seqlen_k) - a.seqlen_q;
  const float slope = a.alibi_slopes ? h.slope() : 0.f, factor = score_factor(a);
  for (int64_t j = 0; j < keys; j += L) {
    vf x = load(s + j) * factor;
    if (a.softcap > 0) x = tanh_of(x) * a.softcap;
    store(s + j, x);
  }
  if (a.bias.data) {
    const char* bias = element(a.bias.data, h.at(a.bias, row, h.head) + key, a.bias_dtype);
    for (int64_t j = 0; j < keys; j++) s[j] += load_one(element(bias, j, a.bias_dtype), a.bias_dtype);
  }
  if (slope != 0.f)
    for (int64_t j = 0; j < keys; j++) s[j] -= slope * __builtin_fabsf((float)(row + diagonal - key - j));
  if (seen)
    for (int64_t j = 0; j < keys; j++) s[j] = seen[j] ? s[j] : -kInf;
  for (int64_t j = keys; j < round_up(keys, 4 * L); j++) s[j] = -kInf;
}

struct DecodeScratch {
  float *q, *s;
  uint8_t* seen;
  DecodeScratch(Arena& arena, const DecodePlan& plan) {
    q = arena.floats(plan.heads * plan.rows * round_up(plan.args.head_dim, kPad));
    s = arena.floats(kDecodeRows * kDecodeKeys);
    seen = (uint8_t*)arena.floats(kDecodeRows * kDecodeKeys / 4);
  }
};

// R rows against one block of keys: one step of the online softmax for each.
template <int DT, int R>
static void decode_block(const DecodePlan& plan, const DecodeScratch& scratch, const float* q, int64_t batch, int64_t kv_head, int64_t row,
                         int64_t key, int64_t keys, const RowList& k, const RowList& v, float* m, float* l, float* o) {
  const tw_args& a = plan.args;
  const int64_t dim_v = round_up(a.head_dim_v, kPad);
  dot_rows<DT, R>(scratch.s, q, k, keys, a.head_dim);
  bool hides[R], any_hides = false;
  for (int r = 0; r < R; r++) {
    const Head h = decode_head(a, batch, kv_head, row + r);
    float* s = scratch.s + r * kDecodeKeys;
    uint8_t* seen = scratch.seen + r * kDecodeKeys;
    const int64_t i = (row + r) % a.seqlen_q;
    hides[r] = find_hidden(seen, h, i, key, keys);
    finish_scores(s, hides[r] ? seen : nullptr, h, i, key, keys);
    any_hides |= hides[r];
    vf top = splat(-kInf);
    for (int64_t j = 0; j < keys; j += L) top = maximum(top, load(s + j));
    const float highest = maximum_of_lanes(top), m_new = m[r] > highest ? m[r] : highest;
    const float center = m_new == -kInf ? 0.f : m_new, rescale = exp_of(splat(m[r] - center))[0];
    vf sum = {};
    for (int64_t j = 0; j < keys; j += 4 * L) {  // the scores beyond are -inf, up to a multiple of 4 L
      vf p[4];
      TW_UNROLL for (int x = 0; x < 4; x++) p[x] = load(s + j + x * L) - center;
      exp_each<4>(p);
      TW_UNROLL for (int x = 0; x < 4; x++) store(s + j + x * L, p[x]);
      sum += (p[0] + p[1]) + (p[2] + p[3]);
    }
    m[r] = m_new;
    l[r] = l[r] * rescale + sum_lanes(sum);
    if (rescale != 1.f)
      for (int64_t c = 0; c < dim_v; c += L) store(o + r * dim_v + c, load(o + r * dim_v + c) * rescale);
  }
  bool finite = true;
  for (int64_t j = 0; any_hides && finite && j < keys; j++) finite = rows_finite<DT>(v[j], 0, 1, a.head_dim_v);
  if (finite) return add_values<DT, R>(o, scratch.s, v, keys, a.head_dim_v);
  for (int r = 0; r < R; r++)  // 0 times a hidden NaN or infinity must not be added
    for (int64_t j = 0; j < keys; j++)
      if (!hides[r] || scratch.seen[r * kDecodeKeys + j])
        add_values<DT, 1>(o + r * dim_v, scratch.s + r * kDecodeKeys + j, {v.base, v.offsets + j}, 1, a.head_dim_v);
}

static void merge_splits(const DecodePlan& plan, int64_t batch, int64_t kv_head) {
  const tw_args& a = plan.args;
  const int64_t dim_v = round_up(a.head_dim_v, kPad), first = (batch * a.heads_k + kv_head) * plan.splits * plan.rows;
  for (int64_t r = 0; r < plan.rows; r++) {
    const Head h = decode_head(a, batch, kv_head, r);
    const float sink = a.sink ? a.sink[h.head] : -kInf;
    float top = sink;
    for (int64_t s = 0; s < plan.splits; s++) {
      const float m = plan.m[first + s * plan.rows + r];
      top = top > m ? top : m;
    }
    const float center = top == -kInf ? 0.f : top;
    float l = a.sink ? exp_of(splat(sink - center))[0] : 0.f, *o = plan.o + (first + r) * dim_v;
    for (int64_t s = 0; s < plan.splits; s++) {
      const int64_t at = first + s * plan.rows + r;
      const float weight = exp_of(splat(plan.m[at] - center))[0], *part = plan.o + at * dim_v;
      l += weight * plan.l[at];
      for (int64_t c = 0; c < dim_v; c += L) store(o + c, s == 0 ? load(part + c) * weight : load(o + c) + load(part + c) * weight);
    }
    const int64_t row = r % a.seqlen_q;
    const float factor = l == 0.f ? 0.f : 1.f / l;
    store_rows(h.out(a.o, row, h.head), 0, o, dim_v, 1, a.head_dim_v, &factor, 0, a.dtype);
    if (a.lse) a.lse[h.statistics(row)] = l == 0.f ? -kInf : top + log_of(splat(l))[0];
  }
}

// The rows of one head start afresh: Q in fp32, m = -inf, l = 0, O = 0. Widens `range` by the keys of the split that some row sees.
template <int DT>
static void start_rows(const DecodePlan& plan, float* q, int64_t batch, int64_t kv_head, int64_t at, KeyRange split, KeyRange& range) {
  const tw_args& a = plan.args;
  const int64_t dim = round_up(a.head_dim, kPad);
  for (int64_t r = 0; r < plan.rows; r++) {
    const int64_t i = r % a.seqlen_q;
    const Head h = decode_head(a, batch, kv_head, r);
    load_rows<DT>(q + r * dim, dim, h.q(i), 0, 1, a.head_dim);
    plan.m[at + r] = -kInf;
    plan.l[at + r] = 0.f;
    const BandList bands = bands_at(h.plane, i);
    for (int64_t x = bands.begin; x < bands.end; x++) {
      const KeyRange seen = keys_seen(bands[x], i, split.begin, split.end);
      if (seen.begin < seen.end) range = {min_of(range.begin, seen.begin), max_of(range.end, seen.end)};
    }
  }
  const int64_t dim_v = round_up(a.head_dim_v, kPad);
  memset(plan.o + at * dim_v, 0, (size_t)(plan.rows * dim_v) * 4);
}

// One split of the keys, for plan.heads heads.
template <int DT>
static void decode_split(const void* context, int64_t item, char* memory) {
  const DecodePlan& plan = *(const DecodePlan*)context;
  const tw_args& a = plan.args;
  Arena arena = {memory};
  const DecodeScratch scratch(arena, plan);
  const int64_t split = item % plan.splits, groups = a.heads_k / plan.heads, batch = item / plan.splits / groups;
  const int64_t head0 = item / plan.splits % groups * plan.heads, dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad);
  const int64_t valid = a.seqlens_k ? a.seqlens_k[batch] : a.seqlen_k, first = split * kSplit;
  const KeyRange keys = {min_of(first, valid), min_of(first + kSplit, valid)};
  KeyRange range = {keys.end, keys.begin};
  for (int64_t h = 0; h < plan.heads; h++) {
    const int64_t at = ((batch * a.heads_k + head0 + h) * plan.splits + split) * plan.rows;
    start_rows<DT>(plan, scratch.q + h * plan.rows * dim, batch, head0 + h, at, keys, range);
  }
  KeyRows block[2];
  if (range.begin < range.end) block[0].locate(a, batch, range.begin, min_of(kDecodeKeys, range.end - range.begin));
  for (int64_t key = range.begin, turn = 0; key < range.end; key += kDecodeKeys, turn ^= 1) {
    const KeyRows& now = block[turn];
    KeyRows& after = block[turn ^ 1];
    after.locate(a, batch, key + kDecodeKeys, max_of(min_of(kDecodeKeys, range.end - key - kDecodeKeys), (int64_t)0));
    for (int64_t h = 0; h < plan.heads; h++) {
      const bool last = h + 1 == plan.heads;  // then the first head's next block follows
      const int64_t next_head = last ? head0 : head0 + h + 1, size = element_bytes(DT), next = last ? after.keys : now.keys;
      const char *k = (const char*)a.k.data, *v = (const char*)a.v.data;
      RowList k_rows = {k + (head0 + h) * a.k.head * size, now.k, k + next_head * a.k.head * size, last ? after.k : now.k, next, a.head_dim * size};
      RowList v_rows = {v + (head0 + h) * a.v.head * size, now.v, v + next_head * a.v.head * size, last ? after.v : now.v, next, a.head_dim_v * size};
      const int64_t at = ((batch * a.heads_k + head0 + h) * plan.splits + split) * plan.rows;
      const float* q = scratch.q + h * plan.rows * dim;
#define TW_ROWS(R)                                                                                                                             \
  for (; row + R <= plan.rows; row += R, k_rows.next = v_rows.next = 0)                                                                        \
  decode_block<DT, R>(plan, scratch, q + row * dim, batch, head0 + h, row, key, now.keys, k_rows, v_rows, plan.m + at + row, plan.l + at + row, \
                      plan.o + (at + row) * dim_v)
      int64_t row = 0;
      TW_ROWS(4);
      TW_ROWS(2);
      TW_ROWS(1);
#undef TW_ROWS
    }
  }
  for (int64_t h = 0; h < plan.heads; h++)
    if (__atomic_sub_fetch(&plan.unfinished[batch * a.heads_k + head0 + h], 1, __ATOMIC_ACQ_REL) == 0) merge_splits(plan, batch, head0 + h);
}

static int64_t decode_workspace(const tw_args& a) { return plan_decode(a).bytes; }

static int decode(const tw_args& a) {
  const DecodePlan plan = plan_decode(a);
  const int64_t heads = a.batch * a.heads_k;
  for (int64_t h = 0; h < heads; h++) plan.unfinished[h] = plan.splits;
  Arena size = {nullptr};
  const DecodeScratch measure(size, plan);
  (void)measure;
  const tw_phase phase = {a.dtype == TW_FP32 ? decode_split<TW_FP32> : a.dtype == TW_BF16 ? decode_split<TW_BF16> : decode_split<TW_FP16>,
                          heads / plan.heads * plan.splits, false};
  return tw_run(&phase, 1, useful_threads(a), size.used, &plan);
}

}  // namespace TW_NAMESPACE
