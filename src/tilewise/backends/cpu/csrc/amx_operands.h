// Tensors to and from the cells of amx.h: splitting into bf16 planes, the four ways a row of a tensor becomes an operand, and back.
#pragma once
#include "amx.h"
#include "elements.h"
#include "plan.h"

namespace TW_NAMESPACE {

template <int T>
constexpr int kDtype = T == 1 ? TW_BF16 : T == 2 ? TW_FP16 : TW_FP32;

// Scratch for `columns` columns of `rows` cells, `planes` times.
static Cells arena_cells(Arena& arena, int64_t rows, int64_t columns, int planes) {
  const int64_t plane = rows * columns * kCell;
  return {(char*)arena.floats(planes * plane / 4), rows, plane};
}
template <int T>
static Cells bf16_cells(Arena& arena, int64_t rows, int64_t columns) {
  return arena_cells(arena, rows, columns, T);
}

// The upper halves of the words of x and y, side by side.
TW_INLINE vi side_by_side(vi x, vi y) {
  alignas(64) static constexpr uint16_t index[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (vi)_mm512_permutex2var_epi16((__m512i)x, _mm512_load_si512(index), (__m512i)y);
}
// And word by word, x's below y's: a shift and a select, where a permutation takes twice as long.
TW_INLINE vi word_by_word(vi x, vi y) {
  return (vi)_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32((__m512i)x, 16), (__m512i)y);
}

// Words whose upper halves are the planes of x; every plane is rounded to nearest (ties away from zero), but the third of fp32, whose eight bits fit.
template <int T>
TW_INLINE void split(vf x, vi* planes) {
  const vi half = splat((int32_t)0x8000), upper = splat((int32_t)0xffff0000);
  TW_UNROLL for (int p = 0; p < T - 1; p++) {
    planes[p] = ((vi)x + half) & upper;
    x = x - (vf)planes[p];
  }
  planes[T - 1] = T == 3 ? (vi)x : (vi)x + half;
}

// Cells of A and B from the numbers for their lower and upper, or even and odd, halves. Exact: they are bf16 as they are.
template <int T, bool Exact>
TW_INLINE void store_halves(char* cell, int64_t plane, vf low, vf high) {
  if constexpr (T == 1 && !Exact) {
    store((float*)cell, (vf)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  } else if constexpr (T == 1) {
    store((float*)cell, (vf)side_by_side((vi)low, (vi)high));
  } else {
    vi x[T], y[T];
    split<T>(low, x);
    split<T>(high, y);
    TW_UNROLL for (int p = 0; p < T; p++) store((float*)(cell + p * plane), (vf)side_by_side(x[p], y[p]));
  }
}
template <int T, bool Exact>
TW_INLINE void make_words(vf even, vf odd, vi* words) {
  if constexpr (T == 1 && Exact) {
    words[0] = word_by_word((vi)even, (vi)odd);
  } else {
    vi x[T], y[T];
    split<T>(even, x);
    split<T>(odd, y);
    TW_UNROLL for (int p = 0; p < T; p++) words[p] = word_by_word(x[p], y[p]);
  }
}
template <int T, bool Exact>
TW_INLINE void store_words(char* cell, int64_t plane, vf even, vf odd) {
  vi words[T];
  make_words<T, Exact>(even, odd, words);
  TW_UNROLL for (int p = 0; p < T; p++) store((float*)(cell + p * plane), (vf)words[p]);
}

// Collects whether all inputs split into planes: none is NaN or infinite, or would round to it; and none of fp32 is so small, but not 0, that its
// last plane is below the smallest normal number, which the unit takes for 0.
template <int T>
struct Finite {
  vi largest = {}, largest_half = {};
  vu smallest = (vu)splat(-1);  // less 1
  inline __attribute__((always_inline)) void look(vf x) {
    const vi magnitude = (vi)x & splat((int32_t)0x7fffffff);
    largest = (vi)_mm512_max_epi32((__m512i)largest, (__m512i)magnitude);
    if constexpr (T == 3) smallest = (vu)_mm512_min_epu32((__m512i)smallest, (__m512i)(magnitude - splat(1)));
  }
  inline __attribute__((always_inline)) void look_halves(vi x) {  // two bf16 a word
    const __m512i magnitude = _mm512_and_si512((__m512i)x, _mm512_set1_epi16(0x7fff));
    largest_half = (vi)_mm512_max_epu16((__m512i)largest_half, magnitude);
  }
  bool all() const {
    constexpr uint32_t kSmallest = (uint32_t)(127 - 126 + 24) << 23;
    return _mm512_reduce_max_epi32((__m512i)largest) < 0x7f7f8000 && _mm512_reduce_min_epu32((__m512i)smallest) >= kSmallest - 1 &&
           _mm512_cmpge_epu16_mask((__m512i)largest_half, _mm512_set1_epi16(0x7f80)) == 0;
  }
};

// The same for rows that were looked at before.
struct Looked {
  TW_MEMBER void look(vf) {}
};

// Rows of a tensor, as many as there are; beyond them and beyond dim lie zeros.
template <int T>
struct Rows {
  const char* data;
  int64_t stride, rows, dim;
  template <class Look>
  inline __attribute__((always_inline)) vf load(int64_t row, int64_t column, Look& finite) const {
    const vf x = row < rows ? load_first<kDtype<T>>(element(data, row * stride + column, kDtype<T>), dim - column) : vf{};
    finite.look(x);
    return x;
  }
};

// 32 numbers of a row as one cell for each plane; bf16 as they lie in memory.
template <int T>
TW_INLINE void load_cell(const Rows<T>& in, int64_t row, int64_t column, Finite<T>& finite, vi* cell) {
  if constexpr (T == 1) {
    const int64_t n = row < in.rows ? min_of(in.dim - column, (int64_t)32) : 0;
    const __mmask32 first = n == 32 ? ~0u : (1u << n) - 1;
    cell[0] = (vi)_mm512_maskz_loadu_epi16(first, in.data + (row * in.stride + column) * 2);
    finite.look_halves(cell[0]);
  } else {
    vi x[T], y[T];
    split<T>(in.load(row, column, finite), x);
    split<T>(in.load(row, column + 16, finite), y);
    TW_UNROLL for (int p = 0; p < T; p++) cell[p] = side_by_side(x[p], y[p]);
  }
}

// A: rows of the tensor are rows of cells, 32 of dim a cell. `rows` as padded.
template <int T>
static void pack_rows(const Cells& out, const Rows<T>& in, int64_t rows, Finite<T>& finite) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < in.dim; c += 32) {
      vi cell[T];
      load_cell<T>(in, r, c, finite, cell);
      TW_UNROLL for (int p = 0; p < T; p++) store((float*)(out.at(r, c / 32) + p * out.plane), (vf)cell[p]);
    }
}

// B: rows of the tensor are columns, 16 a cell; cells are pairs of dim.
template <int T>
static void pack_rows_transposed(const Cells& out, const Rows<T>& in, int64_t rows, Finite<T>& finite) {
  for (int64_t r = 0; r < rows; r += 16)
    for (int64_t c = 0; c < in.dim; c += 32) {
      vf words[T][16];
      TW_UNROLL for (int x = 0; x < 16; x++) {
        vi cell[T];
        load_cell<T>(in, r + x, c, finite, cell);
        TW_UNROLL for (int p = 0; p < T; p++) words[p][x] = (vf)cell[p];
      }
      for (int p = 0; p < T; p++) {
        transpose(words[p]);
        TW_UNROLL for (int x = 0; x < 16; x++) store((float*)(out.at(c / 2 + x, r / 16) + p * out.plane), words[p][x]);
      }
    }
}

// B: rows of the tensor, which were looked at before, are summed over, two a cell; columns of 16 are columns.
template <int T>
static void pack_pairs(const Cells& out, const Rows<T>& in, int64_t rows) {
  Looked finite;
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t c = 0; c < in.dim; c += 16)
      store_words<T, true>(out.at(r / 2, c / 16), out.plane, in.load(r, c, finite), in.load(r + 1, c, finite));
}

// A: dim are rows, rows of the tensor are summed over, 32 a cell.
template <int T, class Look>
static void pack_pairs_transposed(const Cells& out, const Rows<T>& in, int64_t rows, Look& finite) {
  for (int64_t r = 0; r < rows; r += 32)
    for (int64_t c = 0; c < in.dim; c += 16) {
      vf words[T][16];
      TW_UNROLL for (int x = 0; x < 16; x++) {
        vi pair[T];
        make_words<T, true>(in.load(r + 2 * x, c, finite), in.load(r + 2 * x + 1, c, finite), pair);
        TW_UNROLL for (int p = 0; p < T; p++) words[p][x] = (vf)pair[p];
      }
      for (int p = 0; p < T; p++) {
        transpose(words[p]);
        TW_UNROLL for (int x = 0; x < 16; x++) store((float*)(out.at(c + x, r / 32) + p * out.plane), words[p][x]);
      }
    }
}

// From a column of C whose cells are dim and whose lanes are rows, times a factor for each row.
template <int T>
static void store_column(char* out, int64_t stride, const float* column, int64_t rows, int64_t dim, vf factor) {
  constexpr int DT = kDtype<T>;
  for (int64_t c = 0; c < dim; c += 16) {
    vf x[16];
    TW_UNROLL for (int i = 0; i < 16; i++) x[i] = load(column + (c + i) * 16) * factor;
    transpose(x);
    for (int64_t r = 0; r < min_of(rows, (int64_t)16); r++) store_first<DT>(element(out, r * stride + c, DT), x[r], dim - c);
  }
}

// From columns of C whose cells are rows, times a factor.
template <int DT>
static void store_cells(char* out, int64_t stride, const Cells& in, int64_t rows, int64_t dim, float factor) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < dim; c += 16)
      store_first<DT>(element(out, r * stride + c, DT), load(floats(in, r, c / 16)) * splat(factor), dim - c);
}

// 2^x for any x: 2^floor(x) times a polynomial of the rest, exact at 0; -inf gives 0, NaN comes through. Relative error of the polynomial: 8e-8, and
// 2e-9 for fp32 (minimax on [0, 1]).
template <int T>
constexpr int kDegree = T == 3 ? 6 : 5;
constexpr float kPower[7][6] = {
    {}, {}, {}, {}, {},
    {0.6931512951850891f, 0.24016444385051727f, 0.05579991266131401f, 0.009017030708491802f, 0.0018671300495043397f},
    {0.6931470632553101f, 0.2402293086051941f, 0.055485282093286514f, 0.009675451554358006f, 0.0012467846972867846f, 0.00021612914861179888f}};
template <int T, int U>
TW_INLINE void power_each(vf* x) {
  constexpr int D = kDegree<T>;
  vf f[U], p[U];
  TW_UNROLL for (int u = 0; u < U; u++) f[u] = (vf)_mm512_reduce_ps((__m512)x[u], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  TW_UNROLL for (int u = 0; u < U; u++) p[u] = splat(kPower[D][D - 1]) * f[u] + splat(kPower[D][D - 2]);
  TW_UNROLL for (int c = D - 3; c >= 0; c--) TW_UNROLL for (int u = 0; u < U; u++) p[u] = p[u] * f[u] + splat(kPower[D][c]);
  TW_UNROLL for (int u = 0; u < U; u++) p[u] = p[u] * f[u] + splat(1.f);
  TW_UNROLL for (int u = 0; u < U; u++) x[u] = (vf)_mm512_scalef_ps((__m512)p[u], (__m512)x[u]);
}
template <int T>
TW_INLINE vf power_of(vf x) {
  power_each<T, 1>(&x);
  return x;
}

}  // namespace TW_NAMESPACE
