// What happens between Q K^T and the softmax: softcap, bias, ALiBi; and dropout after it. All on s[key][lane], lanes = query rows.
#pragma once
#include "elementary.h"
#include "mask.h"
#include "philox.h"

namespace TW_NAMESPACE {

// One (batch, query head) of a call.
struct Head {
  const tw_args& args;
  const tw_plane& plane;
  int64_t batch, head, kv_head;

  Head(const tw_args& a, int64_t b, int64_t h) : args(a), plane(plane_of(a, b, h)), batch(b), head(h), kv_head(h / (a.heads_q / a.heads_k)) {}
  int64_t at(const tw_tensor& t, int64_t row, int64_t which) const { return batch * t.batch + row * t.seq + which * t.head; }
  const char* q(int64_t row) const { return element(args.q.data, at(args.q, row, head), args.dtype); }
  const char* k(int64_t row) const { return element(args.k.data, at(args.k, row, kv_head), args.dtype); }
  const char* v(int64_t row) const { return element(args.v.data, at(args.v, row, kv_head), args.dtype); }
  char* out(const tw_tensor& t, int64_t row, int64_t which) const { return element((void*)t.data, at(t, row, which), args.dtype); }
  char* in_wide(const tw_tensor& t, int64_t row, int64_t which) const {
    return element((void*)t.data, at(t, row, which), args.wide ? TW_FP32 : args.dtype);
  }
  int64_t statistics(int64_t row) const { return (batch * args.heads_q + head) * args.seqlen_q + row; }
  float slope() const { return args.alibi_slopes[batch * args.alibi_batch + head]; }
  int64_t diagonal(int64_t row) const { return args.diagonal ? args.diagonal[row] : args.seqlen_k - args.seqlen_q; }
  bool adjusts() const { return args.softcap > 0 || args.bias.data || args.alibi_slopes; }
};

// The largest score of each row, from its maximum and sum: NaN where that is (a score is NaN or +inf), as the maximum may have lost it.
TW_INLINE vf largest_score(vf m, vf l) { return l == l ? m : l; }

// The factor that Q is multiplied with: tanh wants scale / softcap. Beyond 1e30 all scores but 0 are at the cap, and 0 times infinity is none.
constexpr float kMostFactor = 1e30f;
TW_INLINE float score_factor(const tw_args& args) {
  if (!(args.softcap > 0)) return args.scale;
  const float factor = args.scale / args.softcap;
  return factor > kMostFactor ? kMostFactor : factor < -kMostFactor ? -kMostFactor : factor;
}

// s = softcap tanh(s); ds[key][lane] = 1 - tanh^2 where the backward wants the derivative.
static void apply_softcap(float* s, float* ds, int64_t lds, float softcap, int64_t keys, int vectors) {
  for (int64_t j = 0; j < keys; j++)
    for (int v = 0; v < vectors; v++) {
      float* p = s + j * lds + v * L;
      vf slope;
      store(p, tanh_of(load(p), slope) * softcap);
      if (ds) store(ds + j * lds + v * L, slope);
    }
}

template <int DT>
static void add_bias(float* s, int64_t lds, const Head& h, const Crop& c, int vectors) {
  const tw_tensor& bias = h.args.bias;
  const int64_t end = min_of(c.key_end, h.args.seqlen_k), keys = end - c.key_begin;
  const char* base = element(bias.data, h.at(bias, c.row, h.head) + c.key_begin, DT);
  if (bias.seq == 0) {
    for (int64_t j = 0; j < keys; j++) {
      const vf b = splat(load_one<DT>(element(base, j, DT)));
      for (int v = 0; v < vectors; v++) store(s + j * lds + v * L, load(s + j * lds + v * L) + b);
    }
    return;
  }
  for (int v = 0; v < vectors; v++)
    for (int64_t j = 0; j < keys; j += L) {
      vf r[L];
      TW_UNROLL for (int x = 0; x < L; x++) {
        const int64_t i = v * L + x;
        r[x] = i < c.rows ? load_first<DT>(element(base, i * bias.seq + j, DT), keys - j) : vf{};
      }
      transpose(r);
      const int64_t n = min_of(keys - j, (int64_t)L);
      TW_UNROLL for (int x = 0; x < L; x++) {
        float* p = s + (j + x) * lds + v * L;
        if (x < n) store(p, load(p) + r[x]);
      }
    }
}

// dbias += dS, transposed back (summed over the rows where the bias is one for all of them).
static void add_bias_gradient(const float* ds, int64_t lds, const Head& h, const Crop& c, int vectors) {
  const tw_tensor& dbias = h.args.dbias;
  const int64_t keys = min_of(c.key_end, h.args.seqlen_k) - c.key_begin;
  float* base = (float*)dbias.data + h.at(dbias, c.row, h.head) + c.key_begin;
  if (dbias.seq == 0) {
    for (int64_t j = 0; j < keys; j++) {
      float sum = 0;
      for (int v = 0; v < vectors; v++) sum += sum_lanes(load(ds + j * lds + v * L));
      base[j] += sum;
    }
    return;
  }
  for (int v = 0; v < vectors; v++)
    for (int64_t j = 0; j < keys; j += L) {
      vf r[L];
      const int64_t n = min_of(keys - j, (int64_t)L);
      TW_UNROLL for (int x = 0; x < L; x++) r[x] = x < n ? load(ds + (j + x) * lds + v * L) : vf{};
      transpose(r);
      TW_UNROLL for (int x = 0; x < L; x++) {
        float* p = base + (v * L + x) * dbias.seq + j;
        if (v * L + x < c.rows) store_first<TW_FP32>((char*)p, load_first<TW_FP32>((const char*)p, n) + r[x], n);
      }
    }
}

// s -= slope |i + diagonal[i] - j|
static void add_alibi(float* s, int64_t lds, const Head& h, const Crop& c, int vectors) {
  const float slope = h.slope();
  for (int v = 0; v < vectors; v++) {
    vf center;
    for (int x = 0; x < L; x++) {
      const int64_t i = c.row + min_of((int64_t)(v * L + x), c.rows - 1);
      center[x] = (float)(i + h.diagonal(i) - c.key_begin);
    }
    for (int64_t j = 0; j < c.key_end - c.key_begin; j++) {
      const vf distance = center - (float)j;
      float* p = s + j * lds + v * L;
      store(p, load(p) - slope * maximum(distance, -distance));
    }
  }
}

static void adjust_scores(float* s, float* ds, int64_t lds, const Head& h, const Crop& c, int vectors) {
  if (h.args.softcap > 0) apply_softcap(s, ds, lds, h.args.softcap, c.key_end - c.key_begin, vectors);
  if (h.args.bias.data) {
    if (h.args.bias_dtype == TW_FP32) add_bias<TW_FP32>(s, lds, h, c, vectors);
    if (h.args.bias_dtype == TW_BF16) add_bias<TW_BF16>(s, lds, h, c, vectors);
    if (h.args.bias_dtype == TW_FP16) add_bias<TW_FP16>(s, lds, h, c, vectors);
  }
  if (h.args.alibi_slopes) add_alibi(s, lds, h, c, vectors);
}

// factor[key][lane] = 1 / (1 - p) where the pair is kept, 0 where it is dropped.
static void dropout_factors(float* factor, int64_t lds, const Head& h, const Crop& c, int vectors) {
  const tw_args& a = h.args;
  const vf kept = splat(a.dropout_rescale);
  const vi threshold = splat((int32_t)(a.dropout_threshold ^ 0x80000000u));  // unsigned order by signed compares
  const uint32_t head = (uint32_t)(h.batch * (a.all_heads ? a.all_heads : a.heads_q) + a.first_head + h.head);
  for (int v = 0; v < vectors; v++) {
    vi row = lane_index() + splat((int32_t)(c.row + v * L));
    if (a.rows)  // to the call's last: a crop may be a part of another, and have that one's number of rows
      for (int x = 0; x < L; x++) row[x] = (int32_t)a.rows[min_of(c.row + v * L + x, a.seqlen_q - 1)];
    for (int64_t key = c.key_begin & ~(int64_t)3; key < c.key_end; key += 4) {
      vu words[4] = {splat_u((uint32_t)(key / 4)), (vu)row, splat_u(head), splat_u(a.dropout_offset)};
      philox(words, a.dropout_key[0], a.dropout_key[1]);
      TW_UNROLL for (int x = 0; x < 4; x++) {
        const int64_t j = key + x - c.key_begin;
        if (j < 0 || j >= c.key_end - c.key_begin) continue;
        store(factor + j * lds + v * L, ((vi)words[x] ^ splat((int32_t)0x80000000)) >= threshold ? kept : vf{});
      }
    }
  }
}

// Whether all scores that a row sees are -inf, where none is NaN or +inf: so an infinity in Q or K makes one, unless a softcap bounds it.
static TW_APART bool sees_nothing(const Head& h, int64_t row) {
  const tw_args& a = h.args;
  const bool bounded = a.softcap > 0, finite = rows_finite(h.q(row), 0, 1, a.head_dim, a.dtype);
  const BandList bands = bands_at(h.plane, row);
  for (int64_t x = bands.begin; x < bands.end; x++) {
    const int64_t end = min_of(min_of(bands[x].k1, row + bands[x].hi + 1), a.seqlen_k);
    for (int64_t key = max_of(bands[x].k0, row + bands[x].lo); key < end; key++) {
      if (!visible(bands, x, row, key)) continue;
      if (a.bias.data && load_one(element(a.bias.data, h.at(a.bias, row, h.head) + key, a.bias_dtype), a.bias_dtype) == -kInf) continue;
      if (bounded || (finite && rows_finite(h.k(key), 0, 1, a.head_dim, a.dtype))) return false;
    }
  }
  return true;
}

// LSE of rows as their gradients take it: +inf where a row sees nothing, or only scores of -inf, so that P = 0. With a sink such a row's is the sink.
static void lse_of_rows(float* out, const Head& h, int64_t row, int64_t rows) {
  const float *lse = h.args.lse + h.statistics(row), *sink = h.args.sink;
  for (int64_t i = 0; i < rows; i++)
    out[i] = lse[i] == -kInf || (sink && lse[i] == sink[h.head] && sees_nothing(h, row + i)) ? kInf : lse[i];
}

// dsink = -sum exp(sink - lse) delta over all rows of a head, of all batches. Lanes without a row have an lse of 0, and the sink may be far above it.
static void sum_sink_gradient(const tw_args& a, const float* delta_rows, int64_t head) {
  double dsink = 0;
  for (int64_t batch = 0; batch < a.batch; batch++) {
    const Head h(a, batch, head);
    for (int64_t i = 0; i < a.seqlen_q; i += L) {
      const int64_t at = h.statistics(i), n = a.seqlen_q - i;
      const vf lse = load_first<TW_FP32>((const char*)(a.lse + at), n), delta = load_first<TW_FP32>((const char*)(delta_rows + at), n);
      const vf below = splat(a.sink[head]) - lse;
      dsink -= sum_lanes(lse == splat(-kInf) ? vf{} : exp_of(below > splat(0.f) ? vf{} : below) * delta);
    }
  }
  a.dsink[head] = (float)dsink;
}

}  // namespace TW_NAMESPACE
