// What decode.h and decode_backward.h share: a few query rows against many keys, which are read once, where they lie, for all the rows of their head.
//
// Lanes = head dimension here: memory is the limit, and a panel's lanes would be empty. The keys are split over threads, the same way for any number.
#pragma once
#include "nonfinite.h"
#include "plan.h"
#include "scores.h"

namespace TW_NAMESPACE {

constexpr int64_t kDecodeKeys = 128;  // keys of a block, whose scores are softmaxed together
constexpr int kDecodeRows = 6;        // most rows that share a pass over a block: what the registers hold

// The query rows of a batch: its first one in q and o, and how many.
struct Queries {
  int64_t first, count;
};
TW_INLINE Queries queries_of(const tw_args& a, int64_t batch) {
  if (!a.cu_seqlens_q) return {0, a.seqlen_q};
  return {a.cu_seqlens_q[batch], a.cu_seqlens_q[batch + 1] - a.cu_seqlens_q[batch]};
}
TW_INLINE int64_t keys_of(const tw_args& a, int64_t batch) { return a.seqlens_k ? a.seqlens_k[batch] : a.seqlen_k; }

// Query row r of a key/value head.
TW_INLINE Head decode_head(const tw_args& a, int64_t batch, int64_t kv_head, int64_t r) {
  return Head(a, batch, kv_head * (a.heads_q / a.heads_k) + r / queries_of(a, batch).count);
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
      const int64_t slab = a.page_table        ? a.page_table[batch * a.page_table_stride + at / a.page_size]
                           : a.cache_batch_idx ? a.cache_batch_idx[batch]
                                               : batch;
      const int64_t slot = a.page_table ? at % a.page_size : at;
      k[j] = (slab * a.k.batch + slot * a.k.seq) * size;
      v[j] = (slab * a.v.batch + slot * a.v.seq) * size;
    }
  }
};

// How keys are dealt out: an item is one split of some heads.
struct KeySplits {
  const tw_args& args;
  int64_t keys, splits;   // keys of a split; splits of a head
  int64_t heads, groups;  // key/value heads of one item, the last of a batch may have fewer; items that share a batch's heads and split
  int64_t items() const { return args.batch * groups * splits; }
};

static KeySplits key_splits(const tw_args& a, int64_t keys) {
  KeySplits s = {a, keys, max_of((a.seqlen_k + keys - 1) / keys, (int64_t)1), 1, a.heads_k};
  // Where a key's heads lie side by side they are read together, as long as every thread has something to do.
  if (a.k.head >= a.k.seq) return s;
  const int64_t items = max_of(a.batch * s.splits, (int64_t)1), wanted = max_of(min_of((4 * a.threads + items - 1) / items, a.heads_k), (int64_t)1);
  s.heads = (a.heads_k + wanted - 1) / wanted;
  s.groups = (a.heads_k + s.heads - 1) / s.heads;
  return s;
}

struct SplitItem {
  int64_t batch, head, heads, split;
  KeyRange keys;
  SplitItem(const KeySplits& s, int64_t item) {
    const tw_args& a = s.args;
    split = item % s.splits;
    batch = item / s.splits / s.groups;
    head = item / s.splits % s.groups * s.heads;
    heads = min_of(s.heads, a.heads_k - head);
    const int64_t valid = keys_of(a, batch);
    keys = {min_of(split * s.keys, valid), min_of((split + 1) * s.keys, valid)};
  }
};

// Where the keys of an item lie from `key` on, up to `end`, or if there are none those that the next item begins with when no mask hides them.
// Returns the first head of those.
static int64_t locate_after(KeyRows& rows, const KeySplits& s, int64_t number, int64_t key, int64_t end) {
  rows.keys = 0;
  if (key >= end) {
    if (++number >= s.items()) return 0;
    const SplitItem next(s, number);
    key = next.keys.begin, end = next.keys.end;
  }
  const SplitItem item(s, number);
  rows.locate(s.args, item.batch, key, min_of(kDecodeKeys, end - key));
  return item.head;
}

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

// A head's keys or values in a block, and those of the head or block that follows.
static RowList row_list(const tw_args& a, const tw_tensor& t, int64_t dim, int64_t head, const int64_t* offsets, int64_t next_head,
                        const int64_t* next_offsets, int64_t next) {
  const int64_t size = element_bytes(a.dtype);
  const char* base = (const char*)t.data;
  return {base + head * t.head * size, offsets, base + next_head * t.head * size, next_offsets, next, dim * size};
}

// s[r][j] = q[r] . k[j] for R rows and kDecodeKeys keys (rows beyond `keys` are left alone).
template <int DT, int R>
static void dot_rows(float* s, const float* q, const RowList& k, int64_t keys, int64_t dim) {
  constexpr int N = kColumnVectors;  // keys at once, so that a piece of q serves N of them
  const int64_t dim_padded = round_up(dim, kPad), whole = dim / L * L;
  for (int64_t j0 = 0; j0 < keys; j0 += L) {
    vf sums[R][L / N];
    TW_UNROLL for (int x = 0; x < L; x += N) {
      if (j0 + x >= keys) {
        TW_UNROLL for (int r = 0; r < R; r++) sums[r][x / N] = vf{};
        continue;
      }
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

// The keys of a block whose rows hold a NaN or an infinity, and the others.
struct OddKeys {
  int64_t odd = 0, rest = 0;
  uint8_t odd_keys[kDecodeKeys], rest_keys[kDecodeKeys];
  int64_t offsets[kDecodeKeys];  // of the others

  template <int DT>
  void look(const RowList& rows, int64_t keys, int64_t dim) {
    bool finite = true;
    for (int64_t j = 0; finite && j < keys; j++) finite = rows_finite<DT>(rows[j], 0, 1, dim);
    for (int64_t j = 0; !finite && j < keys; j++) {
      if (rows_finite<DT>(rows[j], 0, 1, dim)) offsets[rest] = rows.offsets[j], rest_keys[rest++] = (uint8_t)j;
      else odd_keys[odd++] = (uint8_t)j;
    }
  }
};

// o[r] += sum_j p[r][j] v[j] over the keys that row r sees, of which some are not finite: 0 times a hidden NaN or infinity must not be added.
// seen[r][j] matters where hides[r].
template <int DT, int R>
static void add_seen_values(float* o, const float* p, const RowList& v, const OddKeys& keys, int64_t dim, const uint8_t* seen, const bool* hides) {
  const int64_t dim_padded = round_up(dim, kPad);
  float weights[R * kDecodeKeys];
  for (int r = 0; r < R; r++) {
    for (int64_t x = 0; x < keys.odd; x++) {
      const int64_t j = keys.odd_keys[x];
      if (!hides[r] || seen[r * kDecodeKeys + j]) add_values<DT, 1>(o + r * dim_padded, p + r * kDecodeKeys + j, {v.base, v.offsets + j}, 1, dim);
    }
    for (int64_t x = 0; x < keys.rest; x++) weights[r * kDecodeKeys + x] = p[r * kDecodeKeys + keys.rest_keys[x]];
  }
  RowList rest = v;
  rest.offsets = keys.offsets;
  add_values<DT, R>(o, weights, rest, keys.rest, dim);
}

// Which keys of a block the bands show a row; false where they show all, and then `seen` is not written.
static bool hidden_by_bands(uint8_t* seen, const Head& h, int64_t row, int64_t key, int64_t keys) {
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

// Which keys of a block a row sees; false where it sees them all, and then `seen` says nothing.
static bool find_hidden(uint8_t* seen, const Head& h, int64_t row, int64_t key, int64_t keys) {
  const tw_args& a = h.args;
  bool hides = hidden_by_bands(seen, h, row, key, keys);
  const int64_t first = a.leftpad ? a.leftpad[h.batch] : 0;
  const int64_t newest = a.tree ? keys_of(a, h.batch) - a.tree_new : INT64_MAX;  // the first key of the tree
  const int64_t place = row - queries_of(a, h.batch).count + a.tree_new;         // of the row in it
  const bool in_tree = a.tree && place >= 0 && key + keys > newest;
  if (key >= first && !in_tree) return hides;
  if (!hides) memset(seen, 1, kDecodeKeys);
  if (key < first) memset(seen, 0, (size_t)min_of(first - key, keys));
  if (in_tree) {
    const uint8_t* shown = a.tree + h.batch * a.tree_batch + place * a.tree_new;
    for (int64_t j = max_of(newest - key, (int64_t)0); j < keys; j++) seen[j] &= shown[key + j - newest] != 0;
  }
  return true;
}

}  // namespace TW_NAMESPACE
