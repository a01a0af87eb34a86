// Which pairs of a panel and a block of keys are visible: crops of bands, and the element predicate.
#pragma once
#include "elements.h"

namespace TW_NAMESPACE {

TW_INLINE const tw_plane& plane_of(const tw_args& args, int64_t batch, int64_t head) {
  return args.planes[args.plane_of ? args.plane_of[batch * args.heads_q + head] : 0];
}

struct Band {
  int64_t q0, q1, k0, k1, lo, hi;
};

// The bands that touch the block of TW_ROW_BLOCK rows with `row` in it; where none are listed, all.
struct BandList {
  const tw_plane* plane;
  int64_t begin, end;
  const Band& operator[](int64_t x) const { return ((const Band*)plane->bands)[index(x)]; }
  int64_t index(int64_t x) const { return plane->row_bands ? plane->row_bands[x] : x; }
};

TW_INLINE BandList bands_at(const tw_plane& plane, int64_t row) {
  if (!plane.row_ptr) return {&plane, 0, plane.n_bands};
  const int64_t block = row / TW_ROW_BLOCK;
  return {&plane, plane.row_ptr[block], plane.row_ptr[block + 1]};
}

// Whether every query sees every key.
TW_INLINE bool shows_all(const tw_args& a) {
  const tw_plane& plane = a.planes[0];
  if (a.plane_of || plane.n_bands != 1 || plane.in_bitmap) return false;
  const Band& b = *(const Band*)plane.bands;
  return b.q0 <= 0 && b.k0 <= 0 && b.q1 >= a.seqlen_q && b.k1 >= a.seqlen_k && b.lo <= 1 - a.seqlen_q && b.hi >= a.seqlen_k - 1;
}

// The part of a band in rows [row, row + rows) and keys [key, key + keys): the keys that at least one of those rows sees.
struct Crop {
  int64_t row, rows;          // the panel
  int64_t key_begin, key_end;  // absolute
  bool partial;               // some pair of (panel, keys) is hidden
  bool empty() const { return key_begin >= key_end; }
};

// Keys are taken `pack` at a time, counted from `key` (even, as all blocks start at even keys).
TW_INLINE Crop crop(const BandList& list, int64_t x, int64_t row, int64_t rows, int64_t key, int64_t keys, int pack) {
  const Band& band = list[x];
  const int64_t first = max_of(row, band.q0), last = min_of(row + rows, band.q1) - 1;
  Crop c = {row, rows, max_of(max_of(key, band.k0), first + band.lo), min_of(min_of(key + keys, band.k1), last + band.hi + 1), false};
  if (first > last || c.empty()) {
    c.key_end = c.key_begin;
    return c;
  }
  c.partial = first != row || last != row + rows - 1 || c.key_begin < last + band.lo || c.key_end - 1 > first + band.hi ||
              (list.plane->in_bitmap && list.plane->in_bitmap[list.index(x)]);
  if (pack == 2) {
    const int64_t begin = c.key_begin & ~(int64_t)1, end = (c.key_end + 1) & ~(int64_t)1;
    c.partial |= begin != c.key_begin || end != c.key_end;
    c.key_begin = begin;
    c.key_end = end;
  }
  return c;
}

// 32 bits of the bitmap's row for a key, from query row `row` on.
TW_INLINE uint32_t bits_from(const tw_plane& plane, int64_t key, int64_t row) {
  uint64_t word;
  memcpy(&word, plane.bits + key * plane.bits_stride + row / 8, 8);
  return (uint32_t)(word >> (row & 7));
}

TW_INLINE bool visible(const BandList& list, int64_t x, int64_t row, int64_t key) {
  const Band& b = list[x];
  if (row < b.q0 || row >= b.q1 || key < b.k0 || key >= b.k1 || key - row < b.lo || key - row > b.hi) return false;
  return !list.plane->in_bitmap || !list.plane->in_bitmap[list.index(x)] || (bits_from(*list.plane, key, row) & 1);
}

// The keys each lane sees, relative to the crop's first key: [from, to].
struct LaneKeys {
  int32_t from[kPanel], to[kPanel];
};

TW_INLINE void lane_keys(LaneKeys& out, const Band& band, const Crop& c) {
  const int64_t keys = c.key_end - c.key_begin;
  for (int i = 0; i < kPanel; i++) {
    const int64_t row = c.row + i;
    const bool in_band = i < c.rows && row >= band.q0 && row < band.q1;
    const int64_t from = max_of(max_of(row + band.lo, band.k0) - c.key_begin, (int64_t)0), to = min_of(row + band.hi, band.k1 - 1) - c.key_begin;
    out.from[i] = in_band ? (int32_t)min_of(from, keys) : 1;
    out.to[i] = in_band ? (int32_t)max_of(min_of(to, keys - 1), (int64_t)-1) : 0;
    if (in_band && to < from) out.from[i] = 1, out.to[i] = 0;
  }
}

// A NaN that no arithmetic gives: what the backward writes for a hidden score, so that it can tell it from one that is -inf by itself.
constexpr int32_t kHiddenBits = 0x7fedcba9;

constexpr int64_t kMostBands = 4;  // whose keys are computed at once

// Hidden scores of a crop of `bands` bands from x on become `hidden`: pairs that none of them shows.
static void hide_from_all(float* s, int64_t lds, const BandList& list, int64_t x, int64_t bands, const Crop& c, int vectors, vf hidden) {
  LaneKeys keys[kMostBands];
  for (int64_t b = 0; b < bands; b++) lane_keys(keys[b], list[x + b], c);
  for (int v = 0; v < vectors; v++) {
    for (int64_t j = 0; j < c.key_end - c.key_begin; j++) {
      const vi key = splat((int32_t)j);
      vi seen = {};
      for (int64_t b = 0; b < bands; b++) {
        vi shown = (key >= load(keys[b].from + v * L)) & (key <= load(keys[b].to + v * L));
        if (list.plane->in_bitmap && list.plane->in_bitmap[list.index(x + b)] && c.key_begin + j < list[x + b].k1)
          shown &= lanes_of_bits(bits_from(*list.plane, c.key_begin + j, c.row + v * L));
        seen |= shown;
      }
      float* p = s + j * lds + v * L;
      store(p, seen ? load(p) : hidden);
    }
  }
}

// Hidden scores become `hidden`; s[key][lane] with rows `lds` apart.
static void hide(float* s, int64_t lds, const BandList& list, int64_t x, const Crop& c, int vectors, vf hidden) {
  const Band& band = list[x];
  LaneKeys keys;
  lane_keys(keys, band, c);
  const bool bitmap = list.plane->in_bitmap && list.plane->in_bitmap[list.index(x)];
  for (int v = 0; v < vectors; v++) {
    const vi from = load(keys.from + v * L), to = load(keys.to + v * L);
    for (int64_t j = 0; j < c.key_end - c.key_begin; j++) {
      const vi key = splat((int32_t)j);
      vi seen = (key >= from) & (key <= to);
      if (bitmap && c.key_begin + j < band.k1) seen &= lanes_of_bits(bits_from(*list.plane, c.key_begin + j, c.row + v * L));
      float* p = s + j * lds + v * L;
      store(p, seen ? load(p) : hidden);
    }
  }
}

}  // namespace TW_NAMESPACE
