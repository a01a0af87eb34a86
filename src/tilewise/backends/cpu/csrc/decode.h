// A few queries against many keys: every key and value is read once for the query rows of its head, and the keys are split over threads.
//
// The rows of a key/value head are its group's heads times seqlen_q. Lanes = head dimension here: memory is the limit, and a panel's lanes would be
// empty. A split holds kSplit keys whatever the number of threads; whoever finishes a head's last split merges them in order (Flash-Decoding):
// O = sum_s exp(m_s - m) O_s / sum_s exp(m_s - m) l_s.
#pragma once
#include "few_queries.h"

namespace TW_NAMESPACE {

constexpr int64_t kSplit = 1024;  // keys of a split

struct DecodePlan {
  KeySplits parts;
  int64_t most_rows;    // of a key/value head
  int64_t* unfinished;  // (batch, heads_k): splits
  int64_t* first;       // (batch,): where its rows begin in m
  float* m;             // for each batch (heads_k, its splits, its rows); l likewise; o with padded head_dim_v
  float *l, *o;
  int64_t bytes;

  // Of a key/value head: query rows, and splits of the keys that its batch has, so that nothing depends on the others of the call.
  int64_t rows(int64_t batch) const { return parts.args.heads_q / parts.args.heads_k * queries_of(parts.args, batch).count; }
  int64_t splits(int64_t batch) const { return max_of((keys_of(parts.args, batch) + parts.keys - 1) / parts.keys, (int64_t)1); }
  int64_t at(int64_t batch, int64_t head, int64_t split) const { return first[batch] + (head * splits(batch) + split) * rows(batch); }
};

// `measuring`: for its bytes alone, the workspace is not there yet.
static DecodePlan plan_decode(const tw_args& a, bool measuring = false) {
  DecodePlan p = {key_splits(a, kSplit), 0, nullptr, nullptr, nullptr, nullptr, nullptr, 0};
  const int64_t heads = a.batch * a.heads_k;
  Arena arena = {(char*)a.workspace};
  p.unfinished = (int64_t*)arena.floats(2 * heads);
  p.first = (int64_t*)arena.floats(2 * a.batch);
  int64_t parts = 0;
  for (int64_t b = 0; b < a.batch; b++) {
    if (!measuring) p.first[b] = parts;
    parts += a.heads_k * p.splits(b) * p.rows(b);
    p.most_rows = max_of(p.most_rows, p.rows(b));
  }
  p.m = arena.floats(parts);
  p.l = arena.floats(parts);
  p.o = arena.floats(parts * round_up(a.head_dim_v, kPad));
  p.bytes = (int64_t)arena.used;
  return p;
}

// Scores of one row against a block: scale, softcap, bias, ALiBi; what is hidden (seen: null where nothing is) becomes -inf.
static void finish_scores(float* s, const uint8_t* seen, const Head& h, int64_t row, int64_t key, int64_t keys) {
  const tw_args& a = h.args;
  const int64_t diagonal = a.diagonal ? a.diagonal[row] : keys_of(a, h.batch) - queries_of(a, h.batch).count;
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
    q = arena.floats(plan.parts.heads * plan.most_rows * round_up(plan.parts.args.head_dim, kPad));
    s = arena.floats(kDecodeRows * kDecodeKeys);
    seen = (uint8_t*)arena.floats(kDecodeRows * kDecodeKeys / 4);
  }
};

// Some rows of one head and split: Q in fp32, the running statistics, O.
struct DecodeRows {
  const float* q;
  float *m, *l, *o;
  DecodeRows from(int64_t row, int64_t dim, int64_t dim_v) const { return {q + row * dim, m + row, l + row, o + row * dim_v}; }
};

// R rows against one block of keys: one step of the online softmax for each.
template <int DT, int R>
static void decode_block(const DecodePlan& plan, const DecodeScratch& scratch, const DecodeRows& rows, int64_t batch, int64_t kv_head, int64_t row,
                         int64_t key, int64_t keys, const RowList& k, const RowList& v) {
  const tw_args& a = plan.parts.args;
  const int64_t dim_v = round_up(a.head_dim_v, kPad);
  const float* q = rows.q;
  float *m = rows.m, *l = rows.l, *o = rows.o;
  dot_rows<DT, R>(scratch.s, q, k, keys, a.head_dim);
  const int64_t queries = queries_of(a, batch).count;
  bool hides[R], any_hides = false;
  for (int r = 0; r < R; r++) {
    const Head h = decode_head(a, batch, kv_head, row + r);
    float* s = scratch.s + r * kDecodeKeys;
    uint8_t* seen = scratch.seen + r * kDecodeKeys;
    const int64_t i = (row + r) % queries;
    hides[r] = find_hidden(seen, h, i, key, keys);
    finish_scores(s, hides[r] ? seen : nullptr, h, i, key, keys);
    any_hides |= hides[r];
    vf top = splat(-kInf);
    for (int64_t j = 0; j < keys; j += L) top = maximum(top, load(s + j));
    const float highest = maximum_of_lanes(top), m_new = m[r] > highest ? m[r] : highest;
    const float center = m_new == -kInf ? 0.f : m_new, rescale = exp_of(splat(m[r] - center))[0];
    vf sum = {};
    if (keys <= L) {
      sum = exp_of(load(s) - center);
      store(s, sum);
    }
    for (int64_t j = 0; keys > L && j < keys; j += 4 * L) {  // the scores beyond are -inf, up to a multiple of 4 L
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
  OddKeys odd;
  if (any_hides) odd.look<DT>(v, keys, a.head_dim_v);
  if (odd.odd == 0) return add_values<DT, R>(o, scratch.s, v, keys, a.head_dim_v);
  count_careful_tile();
  add_seen_values<DT, R>(o, scratch.s, v, odd, a.head_dim_v, scratch.seen, hides);
}

// decode_block of n <= R rows.
template <int DT, int R, class... Arguments>
static void decode_rows(int64_t n, const Arguments&... arguments) {
  if (n == R) return decode_block<DT, R>(arguments...);
  if constexpr (R > 1) decode_rows<DT, R - 1>(n, arguments...);
}

// Whether a row, whose first split's l is at `at`, saw nothing, or only scores of -inf.
static bool saw_nothing(const DecodePlan& plan, int64_t batch, int64_t at) {
  for (int64_t s = 0; s < plan.splits(batch); s++, at += plan.rows(batch))
    if (plan.l[at] != 0.f) return false;
  return true;
}

// The largest score of a row, whose first split's m and l are at `at`.
static float largest_of_splits(const DecodePlan& plan, int64_t batch, int64_t at) {
  float largest = -kInf;
  for (int64_t s = 0; s < plan.splits(batch); s++, at += plan.rows(batch)) {
    const float m = plan.m[at], l = plan.l[at];
    if (l != l) return l;
    largest = largest > m ? largest : m;
  }
  return largest;
}

// O = o / l and LSE = m + log l of a row of the batch, whose splits begin at `at`.
static void finish_row(const DecodePlan& plan, const Head& h, int64_t row, int64_t at, float* o, float m, float l) {
  const tw_args& a = plan.parts.args;
  const int64_t dim_v = round_up(a.head_dim_v, kPad);
  if (saw_nothing(plan, h.batch, at)) memset(o, 0, (size_t)dim_v * 4);  // 0 times NaN, where all scores are -inf
  const float factor = l == 0.f ? 0.f : 1.f / l;
  const int64_t place = queries_of(a, h.batch).first + row, statistics = a.cu_seqlens_q ? h.head * a.seqlen_q + place : h.statistics(row);
  store_rows(h.in_wide(a.o, place, h.head), 0, o, dim_v, 1, a.head_dim_v, &factor, 0, a.wide ? TW_FP32 : a.dtype);
  if (a.lse) a.lse[statistics] = l == 0.f ? -kInf : m + log_of(splat(l))[0];
  if (a.row_max) a.row_max[statistics] = largest_of_splits(plan, h.batch, at);
}

static void merge_splits(const DecodePlan& plan, int64_t batch, int64_t kv_head) {
  const tw_args& a = plan.parts.args;
  const int64_t dim_v = round_up(a.head_dim_v, kPad), first = plan.at(batch, kv_head, 0), rows = plan.rows(batch), splits = plan.splits(batch);
  const int64_t queries = queries_of(a, batch).count;
  for (int64_t r = 0; r < rows; r++) {
    const Head h = decode_head(a, batch, kv_head, r);
    if (splits == 1 && !a.sink) {  // nothing is to be weighed
      finish_row(plan, h, r % queries, first + r, plan.o + (first + r) * dim_v, plan.m[first + r], plan.l[first + r]);
      continue;
    }
    const float sink = a.sink ? a.sink[h.head] : -kInf;
    float top = sink;
    for (int64_t s = 0; s < splits; s++) {
      const float m = plan.m[first + s * rows + r];
      top = top > m ? top : m;
    }
    const float center = top == -kInf ? 0.f : top;
    float l = a.sink ? exp_of(splat(sink - center))[0] : 0.f, *o = plan.o + (first + r) * dim_v;
    for (int64_t s = 0; s < splits; s++) {
      const int64_t at = first + s * rows + r;
      const float weight = exp_of(splat(plan.m[at] - center))[0], *part = plan.o + at * dim_v;
      l += weight * plan.l[at];
      for (int64_t c = 0; c < dim_v; c += L) store(o + c, s == 0 ? load(part + c) * weight : load(o + c) + load(part + c) * weight);
    }
    finish_row(plan, h, r % queries, first + r, o, top, l);
  }
}

// The rows of one head start afresh: Q in fp32, m = -inf, l = 0, O = 0. Widens `range` by the keys of the split that some row sees.
template <int DT>
static void start_rows(const DecodePlan& plan, float* q, int64_t batch, int64_t kv_head, int64_t at, KeyRange split, KeyRange& range) {
  const tw_args& a = plan.parts.args;
  const int64_t dim = round_up(a.head_dim, kPad), rows = plan.rows(batch);
  const Queries queries = queries_of(a, batch);
  const KeyRange shown = {a.leftpad ? max_of(split.begin, (int64_t)a.leftpad[batch]) : split.begin, split.end};
  for (int64_t r = 0; r < rows; r++) {
    const int64_t i = r % queries.count;
    const Head h = decode_head(a, batch, kv_head, r);
    load_rows<DT>(q + r * dim, dim, h.q(queries.first + i), 0, 1, a.head_dim);
    plan.m[at + r] = -kInf;
    plan.l[at + r] = 0.f;
    const BandList bands = bands_at(h.plane, i);
    for (int64_t x = bands.begin; x < bands.end; x++) {
      const KeyRange seen = keys_seen(bands[x], i, shown.begin, shown.end);
      if (seen.begin < seen.end) range = {min_of(range.begin, seen.begin), max_of(range.end, seen.end)};
    }
  }
  const int64_t dim_v = round_up(a.head_dim_v, kPad);
  memset(plan.o + at * dim_v, 0, (size_t)(rows * dim_v) * 4);
}

// Whether all heads see the same keys.
static bool heads_alike(const tw_args& a, int64_t batch) {
  for (int64_t h = 1; h < a.heads_q; h++)
    if (&plane_of(a, batch, h) != &plane_of(a, batch, 0)) return false;
  return true;
}

// One split of the keys, for some heads. Where heads see other keys, blocks begin in fixed places: which heads share an item depends on the threads.
template <int DT>
static void decode_split(const void* context, int64_t number, char* memory) {
  const DecodePlan& plan = *(const DecodePlan*)context;
  const tw_args& a = plan.parts.args;
  Arena arena = {memory};
  const DecodeScratch scratch(arena, plan);
  const SplitItem item(plan.parts, number);
  if (item.split >= plan.splits(item.batch)) return;
  const int64_t rows_of_head = plan.rows(item.batch);
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad);
  const auto first_row = [&](int64_t h) { return plan.at(item.batch, item.head + h, item.split); };
  KeyRange range = {item.keys.end, item.keys.begin};
  for (int64_t h = 0; h < item.heads; h++)
    start_rows<DT>(plan, scratch.q + h * rows_of_head * dim, item.batch, item.head + h, first_row(h), item.keys, range);
  if (range.begin < range.end && !heads_alike(a, item.batch)) range.begin -= (range.begin - item.keys.begin) % kDecodeKeys;
  KeyRows block[2];
  if (range.begin < range.end) block[0].locate(a, item.batch, range.begin, min_of(kDecodeKeys, range.end - range.begin));
  for (int64_t key = range.begin, turn = 0; key < range.end; key += kDecodeKeys, turn ^= 1) {
    const KeyRows& now = block[turn];
    KeyRows& after = block[turn ^ 1];
    const int64_t head_after = locate_after(after, plan.parts, number, key + kDecodeKeys, range.end);
    for (int64_t h = 0; h < item.heads; h++) {
      const bool last = h + 1 == item.heads;
      const KeyRows& next = last ? after : now;
      const int64_t head = item.head + h, next_head = last ? head_after : head + 1, at = first_row(h);
      RowList k = row_list(a, a.k, a.head_dim, head, now.k, next_head, next.k, next.keys);
      RowList v = row_list(a, a.v, a.head_dim_v, head, now.v, next_head, next.v, next.keys);
      const DecodeRows rows = {scratch.q + h * rows_of_head * dim, plan.m + at, plan.l + at, plan.o + at * dim_v};
      int64_t passes = (rows_of_head + kDecodeRows - 1) / kDecodeRows;
      for (int64_t row = 0; row < rows_of_head; passes--, k.next = v.next = 0) {
        const int64_t n = (rows_of_head - row + passes - 1) / passes;
        decode_rows<DT, kDecodeRows>(n, plan, scratch, rows.from(row, dim, dim_v), item.batch, head, row, key, now.keys, k, v);
        row += n;
      }
    }
  }
  for (int64_t h = 0; h < item.heads; h++)
    if (__atomic_sub_fetch(&plan.unfinished[item.batch * a.heads_k + item.head + h], 1, __ATOMIC_ACQ_REL) == 0)
      merge_splits(plan, item.batch, item.head + h);
}

static int64_t decode_workspace(const tw_args& a) { return plan_decode(a, true).bytes; }

static int decode(const tw_args& a) {
  const DecodePlan plan = plan_decode(a);
  const int64_t heads = a.batch * a.heads_k;
  for (int64_t h = 0; h < heads; h++) plan.unfinished[h] = plan.splits(h / a.heads_k);
  Arena size = {nullptr};
  const DecodeScratch measure(size, plan);
  (void)measure;
  const tw_phase phase = {a.dtype == TW_FP32 ? decode_split<TW_FP32> : a.dtype == TW_BF16 ? decode_split<TW_BF16> : decode_split<TW_FP16>,
                          plan.parts.items(), false};
  return tw_run(&phase, 1, useful_threads(a, 4), size.used, &plan);
}

}  // namespace TW_NAMESPACE
