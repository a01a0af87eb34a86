// What NaN and infinities need beside hidden pairs.
//
// A hidden pair weighs 0, and 0 times NaN is not 0: in O = P V, dQ = dS K, dK = dS^T Q and dV = P^T dO a row that is not finite would reach the outputs
// that it is hidden from. Where a tile hides pairs and meets such rows, its product therefore takes a copy with zeros in their place, and what they give
// to the outputs that see them is added row by row. A tile that hides nothing takes them as they are, which is what the formula says, and scores need
// no care, as what is hidden is overwritten. The number a row gives does not depend on which others are found with it.
#pragma once
#include "mask.h"
#include "operands.h"

extern int64_t tw_careful;  // tiles that took such a copy since the library was loaded, for tests

namespace TW_NAMESPACE {

TW_INLINE void count_careful_tile() { __atomic_fetch_add(&tw_careful, 1, __ATOMIC_RELAXED); }

// The rows of a block of at most kMost that hold a NaN or an infinity, ascending.
struct NonFinite {
  static constexpr int kMost = 576;
  int count = -1;  // -1: not looked yet
  int16_t rows[kMost];

  // Neither clears nor copies rows that are not listed: blocks of queries are made often (2 % of a narrow window's backward).
  NonFinite() {}
  NonFinite(const NonFinite& other) { *this = other; }
  NonFinite& operator=(const NonFinite& other) {
    count = other.count;
    for (int x = 0; x < count; x++) rows[x] = other.rows[x];
    return *this;
  }

  TW_APART void look(const char* in, int64_t stride, int64_t n, int64_t dim, int dtype) {
    count = 0;
    if (rows_finite(in, stride, n, dim, dtype)) return;
    for (int64_t r = 0; r < n; r++)
      if (!rows_finite(element(in, r * stride, dtype), 0, 1, dim, dtype)) rows[count++] = (int16_t)r;
  }
  bool any_of(int64_t begin, int64_t end) const {
    for (int x = 0; x < count; x++)
      if (rows[x] >= begin) return rows[x] < end;
    return false;
  }
};

// A copy of vector rows with zeros in place of those that are not finite. `rows` of them, `columns` words long.
template <class Op>
static TW_APART Operand without(const NonFinite& odd, float* scratch, const Operand& in, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r * Op::kPack < rows; r++) memcpy(scratch + r * columns, in.words + r * in.stride, (size_t)columns * 4);
  for (int x = 0; x < odd.count; x++) {
    const int64_t row = odd.rows[x];
    vi kept = {};
    if (Op::kPack == 2) kept = splat(row % 2 ? (int32_t)0x0000ffff : (int32_t)0xffff0000);
    float* words = scratch + row / Op::kPack * columns;
    for (int64_t c = 0; c < columns; c += L) store(words + c, (vf)((vi)load(words + c) & kept));
  }
  return {scratch, columns};
}

// The rows of a crop's panel that see a key, a bit each.
TW_INLINE uint64_t rows_seeing(const BandList& list, int64_t x, const Crop& c, int64_t key) {
  static_assert(kPanel <= 48, "one word of the bitmap, from any row on");
  const Band& b = list[x];
  const int64_t first = max_of(max_of(b.q0, key - b.hi) - c.row, (int64_t)0), end = min_of(min_of(b.q1, key - b.lo + 1) - c.row, c.rows);
  if (key < b.k0 || key >= b.k1 || first >= end) return 0;
  uint64_t rows = ((uint64_t)1 << end) - ((uint64_t)1 << first);
  if (list.plane->in_bitmap && list.plane->in_bitmap[list.index(x)]) {
    uint64_t bits;
    memcpy(&bits, list.plane->bits + key * list.plane->bits_stride + c.row / 8, 8);
    rows &= bits >> (c.row & 7);
  }
  return rows;
}

// out += weights times rows, given one by one; each kTogether of them are added up by themselves first.
struct RowSum {
  static constexpr int kTogether = 16;
  float* out;
  int64_t dim;
  int dtype;
  int count = 0;
  const char* rows[kTogether] = {};
  float weights[kTogether] = {};

  void add(const char* row, float weight) {
    rows[count] = row;
    weights[count] = weight;
    if (++count == kTogether) finish();
  }
  void finish() {
    if (count == 0) return;
    if (dtype == TW_FP32) flush<TW_FP32>();
    if (dtype == TW_BF16) flush<TW_BF16>();
    if (dtype == TW_FP16) flush<TW_FP16>();
    count = 0;
  }
  template <int DT>
  void flush() {
    for (int64_t c = 0; c < dim; c += L) {
      vf sum = {};
      for (int x = 0; x < count; x++) sum += splat(weights[x]) * load_first<DT>(element(rows[x], c, DT), dim - c);
      store(out + c, load(out + c) + sum);
    }
  }
  // Whether nothing that is added can change `out`.
  bool all_nan() const {
    for (int64_t c = 0; c < dim; c += L) {
      const vf x = load(out + c);
      if (any_lane((x == x) & (lane_index() < splat((int32_t)(dim - c))))) return false;
    }
    return true;
  }
};

// out[i] += sum_j weight(i, j) row(j) over the keys j that are not finite, for the rows i of a panel that see them; both counted from the crop's first.
// odd: counted from key `origin`; alive: a bit for each row that sees anything.
template <class Weight, class Row>
static TW_APART void add_keys_seen(float* out, int64_t stride, int64_t dim, int dtype, const NonFinite& odd, int64_t origin, const BandList& bands, int64_t x,
                          const Crop& c, uint64_t alive, const Weight& weight, const Row& row) {
  int16_t keys[NonFinite::kMost];
  uint64_t seen[NonFinite::kMost], any = 0;
  int n = 0;
  for (int o = 0; o < odd.count; o++) {
    const int64_t key = origin + odd.rows[o];
    if (key < c.key_begin || key >= c.key_end) continue;
    const uint64_t rows = rows_seeing(bands, x, c, key) & alive;
    if (rows == 0) continue;
    keys[n] = (int16_t)(key - c.key_begin);
    seen[n++] = rows;
    any |= rows;
  }
  for (; any; any &= any - 1) {
    const int i = __builtin_ctzll(any);
    RowSum sum = {out + i * stride, dim, dtype};
    if (sum.all_nan()) continue;
    for (int k = 0; k < n; k++)
      if (seen[k] >> i & 1) sum.add(row(keys[k]), weight(i, keys[k]));
    sum.finish();
  }
}

// out[j] += sum_i weight(i, j) row(i) over the rows i of `odd` (bits) that see key j of the crop.
template <class Weight, class Row>
static TW_APART void add_rows_seen(float* out, int64_t stride, int64_t dim, int dtype, uint64_t odd, const BandList& bands, int64_t x, const Crop& c,
                          const Weight& weight, const Row& row) {
  for (int64_t j = 0; j < c.key_end - c.key_begin && odd; j++) {
    uint64_t seen = rows_seeing(bands, x, c, c.key_begin + j) & odd;
    if (seen == 0) continue;
    RowSum sum = {out + j * stride, dim, dtype};
    if (sum.all_nan()) continue;
    for (; seen; seen &= seen - 1) {
      const int i = __builtin_ctzll(seen);
      sum.add(row(i), weight(i, j));
    }
    sum.finish();
  }
}

}  // namespace TW_NAMESPACE
