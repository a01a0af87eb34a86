// NaN and infinities on AMX, whose planes cannot hold them; see nonfinite.h for what they must not reach.
//
// Rows that hold one are packed as zeros. The scores that they would have made are dot products in fp32, put in place of what the tiles gave, and what
// they give to outputs that see them is added after the product. All of it goes by groups of 32 keys and 32 query rows, a bit for each row.
#pragma once
#include "amx_operands.h"
#include "nonfinite.h"

namespace TW_NAMESPACE {

// Which rows of a block were packed as zeros, 32 to a word.
struct OddRows {
  uint32_t* words = nullptr;
  bool any = false;
  uint32_t at(int64_t row) const { return any ? words[row / 32] : 0; }  // from a multiple of 32 on
};

// Packs rows by pack(rows, finite), those that are not finite as zeros, and returns them as they were packed, in `scratch` where they are others.
// `splits` becomes false where a finite number does not split into planes.
template <int T, class Pack>
TW_INLINE Rows<T> pack_finite(const Rows<T>& in, OddRows& odd, char* scratch, bool& splits, const Pack& pack) {
  Finite<T> finite;
  pack(in, finite);
  odd.any = false;
  if (__builtin_expect(finite.all(), 1)) return in;
  constexpr int DT = kDtype<T>;
  memset(odd.words, 0, (size_t)((in.rows + 31) / 32) * sizeof(uint32_t));
  for (int64_t r = 0; r < in.rows; r++) {
    const char* row = element(in.data, r * in.stride, DT);
    char* copy = element((void*)scratch, r * in.dim, DT);
    const size_t bytes = (size_t)(in.dim * element_bytes(DT));
    if (rows_finite<DT>(row, 0, 1, in.dim)) {
      memcpy(copy, row, bytes);
    } else {
      memset(copy, 0, bytes);
      odd.words[r / 32] |= 1u << r % 32;
      odd.any = true;
    }
  }
  Finite<T> rest;
  const Rows<T> copied = {scratch, in.dim, in.rows, in.dim};
  pack(copied, rest);
  if (!rest.all()) splits = false;
  return copied;
}

// The rows of a crop of at most 32 that see each of 32 keys from `key` on through some of `joint` bands.
struct SeenRows {
  uint32_t of[32];
  uint32_t keys = 0, rows = 0;  // that see or are seen at all
  SeenRows(const BandList& bands, int64_t x, int64_t joint, Crop part, int64_t key, uint32_t alive = ~0u) {
    for (int j = 0; j < 32; j++) {
      uint64_t seen = 0;
      for (int64_t b = x; b < x + joint; b++) seen |= part.rows > 0 ? rows_seeing(bands, b, part, key + j) : 0;
      of[j] = (uint32_t)seen & alive;
      rows |= of[j];
      if (of[j]) keys |= 1u << j;
    }
  }
};

// Calls f(i) for every bit that is set, in ascending order.
template <class F>
TW_INLINE void for_bits(uint32_t bits, const F& f) {
  for (; bits; bits &= bits - 1) f((int64_t)__builtin_ctz(bits));
}

template <int T>
static bool has_nan(const char* row, int64_t dim) {
  vi found = {};
  for (int64_t c = 0; c < dim; c += L) {
    const vf x = load_first<kDtype<T>>(element(row, c, kDtype<T>), dim - c);
    found |= x != x;
  }
  return any_lane(found);
}

// x . y in fp32; NaN is the one that survives rounding to planes. Where ZeroCounts, 0 in x counts as 0 against anything.
template <int T, bool ZeroCounts>
static float dot_of(const char* x, const char* y, int64_t dim) {
  constexpr int DT = kDtype<T>;
  vf sum = {};
  for (int64_t c = 0; c < dim; c += L) {
    const vf a = load_first<DT>(element(x, c, DT), dim - c), b = load_first<DT>(element(y, c, DT), dim - c);
    sum += a * (ZeroCounts && DT >= 0 ? (a == vf{} ? vf{} : b) : b);
  }
  const float s = sum_lanes(sum);
  return s == s ? s : __builtin_nanf("");
}

// s[key][row], a C of 32 keys and 32 rows, of those keys of k and rows of q that were packed as zeros, where it is seen. Returns whether one is infinite.
template <int T>
static bool mend_products(const Cells& s, uint32_t odd_keys, uint32_t odd_rows, const SeenRows& seen, const Rows<T>& k, const Rows<T>& q) {
  const int64_t dim = k.dim;
  bool infinite = false;
  const auto key = [&](int64_t j) { return element(k.data, j * k.stride, kDtype<T>); };
  const auto row = [&](int64_t i) { return element(q.data, i * q.stride, kDtype<T>); };
  const auto mend = [&](int64_t j, int64_t i, bool nan) {
    const float x = nan ? __builtin_nanf("") : dot_of<T, false>(key(j), row(i), dim);
    infinite |= x == kInf || x == -kInf;
    floats(s, j, i / L)[i % L] = x;
  };
  for_bits(odd_keys & seen.keys, [&](int64_t j) {
    const bool nan = has_nan<T>(key(j), dim);
    for_bits(seen.of[j], [&](int64_t i) { mend(j, i, nan); });
  });
  for_bits(odd_rows & seen.rows, [&](int64_t i) {
    const bool nan = has_nan<T>(row(i), dim);
    for_bits(seen.keys & ~odd_keys, [&](int64_t j) {
      if (seen.of[j] >> i & 1) mend(j, i, nan);
    });
  });
  return infinite;
}

// out[c][row] += sum_j weight[j][row] * v[j][c] over those of 32 keys that were packed as zeros, for rows that see them. out: C, cells are dim;
// weights: B, pairs of keys are cells; both from the first of the 32 rows.
template <int T>
static void add_odd_keys(const Cells& out, const Cells& weights, uint32_t odd, const SeenRows& seen, const Rows<T>& v) {
  constexpr int DT = kDtype<T>;
  odd &= seen.keys;
  for (int64_t w = 0; w < 2 && odd; w++) {
    uint32_t lanes = 0;
    for_bits(odd, [&](int64_t j) { lanes |= seen.of[j] >> (w * L) & 0xffff; });
    vi lost = splat(-1);
    for (int64_t c = 0; c < v.dim && lanes; c++) {
      const vf x = load(floats(out, c, w));
      lost &= x != x;
    }
    if ((lanes & ~_mm512_test_epi32_mask((__m512i)lost, (__m512i)lost)) == 0) continue;  // all NaN, which nothing changes
    for (uint32_t left = odd; left;) {
      int n = 0;
      const char* rows[RowSum::kTogether];
      vf p[RowSum::kTogether];
      __mmask16 shown[RowSum::kTogether];
      for (; left && n < RowSum::kTogether; left &= left - 1) {
        const int64_t j = __builtin_ctz(left);
        if (!(seen.of[j] >> (w * L) & 0xffff)) continue;
        shown[n] = (__mmask16)(seen.of[j] >> (w * L));
        rows[n] = element(v.data, j * v.stride, DT);
        p[n] = vf{};
        for (int plane = 0; plane < T; plane++) {
          const vi word = load((const int32_t*)(weights.at(j / 2, w) + plane * weights.plane));
          p[n] += (vf)(j % 2 ? word & splat((int32_t)0xffff0000) : word << 16);
        }
        n++;
      }
      for (int64_t c = 0; c < v.dim; c++) {
        vf sum = {};
        for (int x = 0; x < n; x++)
          sum = (vf)_mm512_mask3_fmadd_ps((__m512)p[x], (__m512)splat(load_one<DT>(element(rows[x], c, DT))), (__m512)sum, shown[x]);
        float* to = floats(out, c, w);
        store(to, load(to) + sum);
      }
    }
  }
}

// out[j] += sum_i weight[j][i] * x[i] over those of 32 rows that were packed as zeros and see key j. out: C, keys are cells; weights: A, keys are rows
// and the 32 rows are one column.
template <int T>
static void add_odd_rows(const Cells& out, const Cells& weights, uint32_t odd, const SeenRows& seen, const Rows<T>& x) {
  constexpr int DT = kDtype<T>;
  for_bits(odd & seen.rows ? seen.keys : 0, [&](int64_t j) {
    uint32_t left = seen.of[j] & odd;
    if (left == 0) return;
    vi kept = {};
    for (int64_t c = 0; c < x.dim; c += L) {
      const vf y = load(floats(out, j, c / L));
      kept |= (y == y) & (lane_index() < splat((int32_t)(x.dim - c)));
    }
    if (!any_lane(kept)) return;
    while (left) {
      int n = 0;
      const char* rows[RowSum::kTogether];
      float p[RowSum::kTogether];
      for (; left && n < RowSum::kTogether; left &= left - 1, n++) {
        const int64_t i = __builtin_ctz(left);
        rows[n] = element(x.data, i * x.stride, DT);
        p[n] = 0;
        for (int plane = 0; plane < T; plane++) p[n] += load_one<TW_BF16>(weights.at(j, 0) + plane * weights.plane + 2 * i);
      }
      for (int64_t c = 0; c < x.dim; c += L) {
        vf sum = {};
        for (int y = 0; y < n; y++) sum += splat(p[y]) * load_first<DT>(element(rows[y], c, DT), x.dim - c);
        float* to = floats(out, j, c / L);
        store(to, load(to) + sum);
      }
    }
  });
}

}  // namespace TW_NAMESPACE
