// dQ, dK, dV of a few queries, laid out as decode.h: lanes = head dimension, every key and value is read once for all the rows of its head, and their
// gradients are written at once. Memory is the limit here too, and most of it is dK and dV.
//
// Masks made of bands, and nothing that changes scores: backward.h has the rest.
#pragma once
#include "decode.h"

namespace TW_NAMESPACE {

constexpr int64_t kFewRows = 128, kGradSplit = 512;  // most rows of a key/value head; keys of a split

// Up to so many queries this way is the faster one: a panel that they half fill takes as long as a full one. bf16 beyond 8 is better left to tiles.
static int64_t few_queries(int dtype) { return L == 16 && dtype != TW_BF16 ? 24 : 8; }

static bool few_rows(const tw_args& a) {
  if (a.seqlen_q < 1 || whole_queries(a) > few_queries(a.dtype)) return false;
  if (a.heads_q / a.heads_k * a.seqlen_q > kFewRows || a.softcap > 0 || a.bias.data || a.alibi_slopes || a.sink || a.dropout_rescale > 0)
    return false;
  for (int64_t batch = 0; batch < a.batch; batch++)
    for (int64_t head = 0; head < a.heads_q; head++)
      if (plane_of(a, batch, head).in_bitmap) return false;
  return true;
}

struct FewPlan {
  KeySplits parts;
  int64_t rows;
  int64_t* unfinished;  // (batch, heads_k): splits
  float* dq;            // (batch, heads_k, splits, rows, padded head_dim)
  int64_t bytes;
};

static FewPlan plan_few(const tw_args& a) {
  FewPlan p = {key_splits(a, kGradSplit), a.heads_q / a.heads_k * a.seqlen_q, nullptr, nullptr, 0};
  const int64_t heads = a.batch * a.heads_k;
  Arena arena = {(char*)a.workspace};
  p.unfinished = (int64_t*)arena.floats(2 * heads);
  p.dq = arena.floats(heads * p.parts.splits * p.rows * round_up(a.head_dim, kPad));
  p.bytes = (int64_t)arena.used;
  return p;
}

// The rows of an item's heads, and what a block of keys makes of one head's.
struct FewScratch {
  float *q, *d_o, *lse, *delta, *p, *ds;
  uint8_t* seen;
  FewScratch(Arena& arena, const FewPlan& plan) {
    const tw_args& a = plan.parts.args;
    const int64_t rows = plan.parts.heads * plan.rows;
    q = arena.floats(rows * round_up(a.head_dim, kPad));
    d_o = arena.floats(rows * round_up(a.head_dim_v, kPad));
    lse = arena.floats(rows);
    delta = arena.floats(rows);
    p = arena.floats(plan.rows * kDecodeKeys);
    ds = arena.floats(plan.rows * kDecodeKeys);
    seen = (uint8_t*)arena.floats(plan.rows * kDecodeKeys / 4);
  }
  FewScratch head(int64_t row, int64_t dim, int64_t dim_v) const {
    FewScratch s = *this;
    s.q += row * dim, s.d_o += row * dim_v, s.lse += row, s.delta += row;
    return s;
  }
};

// Q and dO in fp32, LSE (+inf where the row saw nothing, so that P = 0) and delta, which is added up exactly as dP will be.
template <int DT>
static void load_few_rows(const FewPlan& plan, const FewScratch& s, int64_t batch, int64_t kv_head) {
  const tw_args& a = plan.parts.args;
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad), here = 0;
  for (int64_t r = 0; r < plan.rows; r++) {
    const int64_t i = r % a.seqlen_q;
    const Head h = decode_head(a, batch, kv_head, r);
    const float lse = a.lse[h.statistics(i)];
    load_rows<DT>(s.q + r * dim, dim, h.q(i), 0, 1, a.head_dim);
    load_rows<DT>(s.d_o + r * dim_v, dim_v, h.out(a.d_o, i, h.head), 0, 1, a.head_dim_v);
    dot_rows<DT, 1>(s.p, s.d_o + r * dim_v, {h.out(a.o, i, h.head), &here}, 1, a.head_dim_v);
    s.lse[r] = lse == -kInf ? kInf : lse;
    s.delta[r] = s.p[0] - (a.d_lse ? a.d_lse[h.statistics(i)] : 0.f);
  }
}

// P and dS of R rows, from S and dP; 0 where the pair is hidden, whatever else it holds.
template <int R>
static void weigh_few(const FewPlan& plan, const FewScratch& s, int64_t row, int64_t keys, const bool* hides) {
  const vf factor = splat(plan.parts.args.scale);
  for (int64_t r = row; r < row + R; r++) {
    float *p = s.p + r * kDecodeKeys, *ds = s.ds + r * kDecodeKeys;
    for (int64_t j = 0; j < keys; j += L) store(p + j, load(p + j) * factor);  // rounded here, as in the forward
    __asm__ volatile("" ::: "memory");
    for (int64_t j = 0; j < keys; j += L) {
      vf x = at_most_0(load(p + j) - splat(s.lse[r]));
      exp_each<1>(&x);
      store(p + j, x);
      store(ds + j, x * (load(ds + j) - splat(s.delta[r])));
    }
    for (int64_t j = 0; hides[r] && j < keys; j++)
      if (!s.seen[r * kDecodeKeys + j]) p[j] = ds[j] = 0.f;
  }
}

// Rows of a gradient: out[j] = factor * sum_r weights[r][j] x[r], over all rows or those that are not left out.
template <int DT, int J>
TW_INLINE void write_key(char* const (&out)[J], const float* weights, const float* x, int64_t rows, int64_t dim, float factor, const bool* left_out) {
  constexpr int N = 4;
  const int64_t dim_padded = round_up(dim, kPad);
  for (int64_t c = 0; c < dim; c += N * L) {
    vf acc[J][N];
    const int vectors = (int)min_of((dim_padded - c) / L, (int64_t)N);
    TW_UNROLL for (int j = 0; j < J; j++) TW_UNROLL for (int n = 0; n < N; n++) acc[j][n] = vf{};
    for (int64_t r = 0; r < rows; r++) {
      if (left_out && left_out[r]) continue;
      vf y[N];
      TW_UNROLL for (int n = 0; n < N; n++) y[n] = n < vectors ? load(x + r * dim_padded + c + n * L) : vf{};
      TW_UNROLL for (int j = 0; j < J; j++) TW_UNROLL for (int n = 0; n < N; n++) acc[j][n] += splat(weights[r * kDecodeKeys + j]) * y[n];
    }
    TW_UNROLL for (int j = 0; j < J; j++) TW_UNROLL for (int n = 0; n < N; n++)
      if (n < vectors) store_first<DT>(element(out[j], c + n * L, DT), acc[j][n] * factor, dim - c - n * L);
  }
}
// odd: rows of x that are not finite, which keys must not meet that they do not see; null: there are none.
template <int DT>
static void write_keys(char* out, int64_t stride, int64_t keys, const float* weights, const float* x, int64_t rows, int64_t dim, float factor,
                       const bool* odd, const uint8_t* seen) {
  bool left_out[kFewRows];
  // Which rows to leave out of keys [j, j + n); false where those keys differ in that.
  const auto choose = [&](int64_t j, int64_t n) {
    for (int64_t r = 0; r < rows; r++) {
      int64_t count = 0;
      for (int64_t x = 0; odd[r] && x < n; x++) count += !seen[r * kDecodeKeys + j + x];
      if (count != 0 && count != n) return false;
      left_out[r] = count != 0;
    }
    return true;
  };
  for (int64_t j = 0; j < keys;) {
    if (j + 4 <= keys && (!odd || choose(j, 4))) {
      char* const four[4] = {element(out, j * stride, DT), element(out, (j + 1) * stride, DT), element(out, (j + 2) * stride, DT),
                             element(out, (j + 3) * stride, DT)};
      write_key<DT, 4>(four, weights + j, x, rows, dim, factor, odd ? left_out : nullptr);
      j += 4;
      continue;
    }
    if (odd) choose(j, 1);
    char* const one[1] = {element(out, j * stride, DT)};
    write_key<DT, 1>(one, weights + j, x, rows, dim, factor, odd ? left_out : nullptr);
    j++;
  }
}

// Which of some fp32 rows hold a NaN or an infinity; null where none does.
static const bool* odd_rows(bool* odd, const float* x, int64_t rows, int64_t dim) {
  bool any = false;
  for (int64_t r = 0; r < rows; r++) any |= odd[r] = !rows_finite<TW_FP32>((const char*)(x + r * round_up(dim, kPad)), 0, 1, dim);
  return any ? odd : nullptr;
}

// S and dP of n <= R rows, then P, dS and what they add to dQ. odd: of K; none where nothing is hidden.
template <int DT, int R>
static void grad_few(int64_t n, const FewPlan& plan, const FewScratch& s, int64_t row, int64_t keys, const RowList& k, const RowList& v,
                     const bool* hides, const OddKeys& odd, float* dq) {
  if constexpr (R > 1) {
    if (n < R) return grad_few<DT, R - 1>(n, plan, s, row, keys, k, v, hides, odd, dq);
  }
  const tw_args& a = plan.parts.args;
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad), at = row * kDecodeKeys;
  dot_rows<DT, R>(s.p + at, s.q + row * dim, k, keys, a.head_dim);
  dot_rows<DT, R>(s.ds + at, s.d_o + row * dim_v, v, keys, a.head_dim_v);
  weigh_few<R>(plan, s, row, keys, hides);
  const RowList here = {k.base, k.offsets};
  if (odd.odd) add_seen_values<DT, R>(dq + row * dim, s.ds + at, here, odd, a.head_dim, s.seen + at, hides + row);
  else add_values<DT, R>(dq + row * dim, s.ds + at, here, keys, a.head_dim);
}

// A block of keys of one head: dK and dV, and what it adds to dQ.
template <int DT>
static void grad_few_keys(const FewPlan& plan, const FewScratch& s, int64_t batch, int64_t kv_head, int64_t key, int64_t keys, RowList k, RowList v,
                          float* dq) {
  const tw_args& a = plan.parts.args;
  const Head any = decode_head(a, batch, kv_head, 0);
  bool hides[kFewRows], any_hides = false, any_seen = false;
  for (int64_t r = 0; r < plan.rows; r++) {
    uint8_t* seen = s.seen + r * kDecodeKeys;
    const bool dead = s.lse[r] == kInf;
    hides[r] = dead || find_hidden(seen, decode_head(a, batch, kv_head, r), r % a.seqlen_q, key, keys);
    if (dead) memset(seen, 0, kDecodeKeys);
    else if (!hides[r]) memset(seen, 1, kDecodeKeys);
    any_hides |= hides[r];
    for (int64_t j = 0; !any_seen && j < keys; j++) any_seen = seen[j];
  }
  if (!any_seen) {
    for (int64_t j = 0; j < keys; j++) {
      memset(any.in_wide(a.dk, key + j, kv_head), 0, (size_t)(a.head_dim * element_bytes(a.wide ? TW_FP32 : DT)));
      memset(any.in_wide(a.dv, key + j, kv_head), 0, (size_t)(a.head_dim_v * element_bytes(a.wide ? TW_FP32 : DT)));
    }
    return;
  }
  OddKeys odd;
  bool flags[2][kFewRows];
  const bool *odd_q = nullptr, *odd_d_o = nullptr;
  if (any_hides) {
    odd.look<DT>(k, keys, a.head_dim);
    odd_q = odd_rows(flags[0], s.q, plan.rows, a.head_dim);
    odd_d_o = odd_rows(flags[1], s.d_o, plan.rows, a.head_dim_v);
    if (odd.odd || odd_q || odd_d_o) count_careful_tile();
  }
  int64_t passes = (plan.rows + kDecodeRows - 1) / kDecodeRows;
  for (int64_t row = 0; row < plan.rows; passes--, k.next = v.next = 0) {
    const int64_t n = (plan.rows - row + passes - 1) / passes;
    grad_few<DT, kDecodeRows>(n, plan, s, row, keys, k, v, hides, odd, dq);
    row += n;
  }
  const auto write = a.wide ? write_keys<TW_FP32> : write_keys<DT>;
  write(any.in_wide(a.dk, key, kv_head), a.dk.seq, keys, s.ds, s.q, plan.rows, a.head_dim, a.scale, odd_q, s.seen);
  write(any.in_wide(a.dv, key, kv_head), a.dv.seq, keys, s.p, s.d_o, plan.rows, a.head_dim_v, 1.f, odd_d_o, s.seen);
}

// dQ of a head, from its splits in order.
static void merge_few(const FewPlan& plan, int64_t batch, int64_t kv_head) {
  const tw_args& a = plan.parts.args;
  const int64_t dim = round_up(a.head_dim, kPad), size = plan.rows * dim;
  float* dq = plan.dq + (batch * a.heads_k + kv_head) * plan.parts.splits * size;
  for (int64_t split = 1; split < plan.parts.splits; split++)
    for (int64_t c = 0; c < size; c += L) store(dq + c, load(dq + c) + load(dq + split * size + c));
  for (int64_t r = 0; r < plan.rows; r++) {
    const Head h = decode_head(a, batch, kv_head, r);
    store_rows(h.out(a.dq, r % a.seqlen_q, h.head), 0, dq + r * dim, dim, 1, a.head_dim, &a.scale, 0, a.dtype);
  }
}

// One split of the keys, for some heads.
template <int DT>
static void few_split(const void* context, int64_t number, char* memory) {
  const FewPlan& plan = *(const FewPlan*)context;
  const tw_args& a = plan.parts.args;
  Arena arena = {memory};
  const FewScratch scratch(arena, plan);
  const SplitItem item(plan.parts, number);
  const int64_t dim = round_up(a.head_dim, kPad), dim_v = round_up(a.head_dim_v, kPad), size = plan.rows * dim;
  float* dq = plan.dq + ((item.batch * a.heads_k + item.head) * plan.parts.splits + item.split) * size;
  for (int64_t h = 0; h < item.heads; h++) {
    load_few_rows<DT>(plan, scratch.head(h * plan.rows, dim, dim_v), item.batch, item.head + h);
    memset(dq + h * plan.parts.splits * size, 0, (size_t)size * 4);
  }
  KeyRows block[2];
  block[0].locate(a, item.batch, item.keys.begin, min_of(kDecodeKeys, item.keys.end - item.keys.begin));
  for (int64_t key = item.keys.begin, turn = 0; key < item.keys.end; key += kDecodeKeys, turn ^= 1) {
    const KeyRows& now = block[turn];
    KeyRows& after = block[turn ^ 1];
    const int64_t head_after = locate_after(after, plan.parts, number, key + kDecodeKeys, item.keys.end);
    for (int64_t h = 0; h < item.heads; h++) {
      const bool last = h + 1 == item.heads;
      const KeyRows& next = last ? after : now;
      const int64_t head = item.head + h, next_head = last ? head_after : head + 1;
      const RowList k = row_list(a, a.k, a.head_dim, head, now.k, next_head, next.k, next.keys);
      const RowList v = row_list(a, a.v, a.head_dim_v, head, now.v, next_head, next.v, next.keys);
      grad_few_keys<DT>(plan, scratch.head(h * plan.rows, dim, dim_v), item.batch, head, key, now.keys, k, v, dq + h * plan.parts.splits * size);
    }
  }
  for (int64_t h = 0; h < item.heads; h++)
    if (__atomic_sub_fetch(&plan.unfinished[item.batch * a.heads_k + item.head + h], 1, __ATOMIC_ACQ_REL) == 0)
      merge_few(plan, item.batch, item.head + h);
}

static int64_t few_workspace(const tw_args& a) { return plan_few(a).bytes; }

static int backward_of_few(const tw_args& a) {
  const FewPlan plan = plan_few(a);
  for (int64_t h = 0; h < a.batch * a.heads_k; h++) plan.unfinished[h] = plan.parts.splits;
  Arena size = {nullptr};
  const FewScratch measure(size, plan);
  (void)measure;
  const tw_phase phase = {a.dtype == TW_FP32 ? few_split<TW_FP32> : a.dtype == TW_BF16 ? few_split<TW_BF16> : few_split<TW_FP16>,
                          plan.parts.items(), false};
  return tw_run(&phase, 1, useful_threads(a, 10), size.used, &plan);
}

}  // namespace TW_NAMESPACE
