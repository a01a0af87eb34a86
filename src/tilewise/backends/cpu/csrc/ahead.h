// Rows fetched ahead of their use. The rows of one head lie a token apart, often a page's distance, further than processors look ahead by themselves.
#pragma once
#include "scores.h"

namespace TW_NAMESPACE {

// Rows that will be wanted next, of a few tensors, brought into the L2 cache some at a time.
struct Ahead {
  static constexpr int kMost = 5;
  struct Rows {
    const char* data;
    int64_t stride, bytes, rows;  // stride in bytes
  } parts[kMost];
  int count = 0, part = 0;
  int64_t row = 0, left = 0;
  int64_t due = 0, of = 1, owed = 0;  // rows to fetch in so many pieces; of them, times pieces, what is not yet

  void add(const char* data, int64_t stride, int64_t rows, int64_t dim, int dtype) {
    if (rows <= 0) return;
    parts[count++] = {data, stride * element_bytes(dtype), dim * element_bytes(dtype), rows};
    left += rows;
  }
  // Keys of a head and their values.
  void add_keys(const Head& h, int64_t key, int64_t keys) {
    const tw_args& a = h.args;
    add(h.k(key), a.k.seq, keys, a.head_dim, a.dtype);
    add(h.v(key), a.v.seq, keys, a.head_dim_v, a.dtype);
  }
  // The first of `steps` equal shares of what is left.
  void fetch(int64_t steps) {
    for (int64_t n = (left + steps - 1) / steps; n > 0; n--) fetch_row();
  }
  // The same in `pieces` pieces, one at each call of piece(): a burst of fetches would wait for itself.
  void share(int64_t steps, int64_t pieces) {
    due = (left + steps - 1) / steps;
    of = pieces;
    owed = 0;
  }
  TW_MEMBER void piece() {
    for (owed += due; owed >= of && left > 0; owed -= of) fetch_row();
  }
  void fetch_row() {
    const Rows& r = parts[part];
    const char* p = r.data + row * r.stride;
    for (int64_t c = 0; c < r.bytes; c += 64) __builtin_prefetch(p + c, 0, 2);
    if (++row == r.rows) row = 0, part++;
    left--;
  }
};

// What an item of a forward computes: a tile of rows of one head; of a head's tiles the last ones, the longest under a causal mask, come first.
// Under many bands, such as packed documents, a tile sees few keys, and the tiles of all heads follow one another, whose rows lie side by side; else
// those of one head, which share its keys (measured: docs/cpu-notes.md).
struct Tile {
  int64_t row, rows, batch, head;
};
TW_INLINE Tile tile_of(const tw_args& a, int64_t item, int64_t tiles, int64_t tile_rows) {
  const bool heads_first = a.planes[0].row_ptr;
  const int64_t batch = item / a.heads_q / tiles, rest = item % (a.heads_q * tiles), head = heads_first ? rest % a.heads_q : rest / tiles;
  const int64_t row = (tiles - 1 - (heads_first ? rest / a.heads_q : rest % tiles)) * tile_rows;
  return {row, min_of(tile_rows, a.seqlen_q - row), batch, head};
}

// The keys that some of a head's rows see.
struct SeenKeys {
  int64_t begin, end;
};
static SeenKeys keys_seen(const Head& h, int64_t row, int64_t rows) {
  SeenKeys seen = {h.args.seqlen_k, 0};
  for (int64_t r = row; r < row + rows;) {
    const int64_t n = min_of(TW_ROW_BLOCK - r % TW_ROW_BLOCK, row + rows - r);
    const BandList bands = bands_at(h.plane, r);
    for (int64_t x = bands.begin; x < bands.end; x++) {
      const Crop c = crop(bands, x, r, n, 0, h.args.seqlen_k, 1);
      if (!c.empty()) seen = {min_of(seen.begin, c.key_begin), max_of(seen.end, c.key_end)};
    }
    r += n;
  }
  return seen;
}

// What an item of a forward reads first, its rows and a block of keys.
static void add_tile(Ahead& ahead, const tw_args& a, const Tile& t, int64_t block) {
  const Head h(a, t.batch, t.head);
  const int64_t key = keys_seen(h, t.row, t.rows).begin / block * block;
  ahead.add(h.q(t.row), a.q.seq, t.rows, a.head_dim, a.dtype);
  if (key < a.seqlen_k) ahead.add_keys(h, key, min_of(block, a.seqlen_k - key));
}

}  // namespace TW_NAMESPACE
