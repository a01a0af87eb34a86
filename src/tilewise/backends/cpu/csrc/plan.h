// What forward and backward of every kind share: scratch memory, blocks of keys, useful threads, turns on dQ.
#pragma once
#include <sched.h>

#include "mask.h"

namespace TW_NAMESPACE {

// The keys of a block when `keys` are divided evenly into blocks of at most `most`, a multiple of 8 or what else makes full tiles.
TW_INLINE int64_t even_blocks(int64_t keys, int64_t most, int64_t multiple = 8) {
  const int64_t blocks = max_of((keys + most - 1) / most, (int64_t)1);
  return max_of(round_up((keys + blocks - 1) / blocks, multiple), multiple);
}

// Queries of the whole call, of which these may be a part: what gives other bits is chosen by them.
TW_INLINE int64_t whole_queries(const tw_args& a) { return a.whole_q ? a.whole_q : a.seqlen_q; }

// Threads that are worth waking: about one for each 2^20 multiplications, ten microseconds or so. Beginning a head takes as long as 49,152 of them,
// packing and storing a number of a query's rows as 16, of a key's as 8, and `passes` (a backward is three) each as long. (Results do not depend on
// the number of threads.)
static int useful_threads(const tw_args& a, double passes = 1) {
  const double q = (double)a.seqlen_q / (a.cu_seqlens_q ? (double)a.batch : 1), k = (double)a.seqlen_k;
  const double a_head = (q * k + 16 * q + 8 * k) * (double)(a.head_dim + a.head_dim_v) + 49152;
  const double work = passes * (double)(a.batch * a.heads_q) * a_head;
  return (int)min_of((double)a.threads, 1 + work / (1 << 20));
}

// Scratch memory handed out in 64-byte aligned pieces; with a null base it only counts.
struct Arena {
  char* base;
  size_t used = 0;
  float* floats(int64_t n) {
    float* p = (float*)(base + used);
    used += (size_t)round_up(n * 4, 64);
    return p;
  }
};

// How many heads (of `heads` in a batch, `groups` in all) a thread takes at once, their chunks of keys one after another, which is without waiting; they
// are neighbours, whose rows lie on the same pages of memory. 0 where heads are few or do not go round evenly, so that their chunks are shared out.
static int64_t heads_together(const tw_args& a, int64_t groups, int64_t heads) {
  const int64_t threads = max_of((int64_t)a.threads, (int64_t)1), rounds = (groups + threads - 1) / threads;
  if (groups < 4 * threads || rounds * threads * 20 > groups * 21) return 0;
  const int64_t most = max_of(min_of(groups / (4 * threads), heads), (int64_t)1);
  int64_t some = a.k.head < a.k.seq ? most : 1;
  while (heads % some) some--;
  return some;
}

// Who may add to dQ: chunk c at step s (a fixed enumeration of head and rows, the same for every chunk) waits until the chunks before it are past s.
// Items are handed out in ascending order, so whoever is waited for has been started.
struct Turns {
  int64_t* past;  // per (chunk, group): every step below is finished
  int64_t group, groups, chunk;
  bool alone;  // nobody else adds to these rows meanwhile
  int64_t finished = 0;

  void publish(int64_t step) const {
    if (!alone) __atomic_store_n(&past[chunk * groups + group], step, __ATOMIC_RELEASE);
  }
  int64_t progress(int64_t c) const { return __atomic_load_n(&past[c * groups + group], __ATOMIC_ACQUIRE); }
  void wait(int64_t step) {
    if (alone) return;
    while (finished < chunk && progress(finished) == INT64_MAX) finished++;
    for (int64_t c = finished; c < chunk; c++)
      for (int spins = 0; progress(c) <= step; spins++) {
#if defined(__x86_64__)
        _mm_pause();
#endif
        if (spins % 256 == 255) sched_yield();
      }
  }
};

// The rows that see some key of [begin, end).
struct RowRange {
  int64_t begin, end;
};
static RowRange rows_that_see(const tw_plane& plane, int64_t begin, int64_t end, int64_t seqlen_q) {
  RowRange r = {seqlen_q, 0};
  for (int64_t x = 0; x < plane.n_bands; x++) {
    const Band& b = ((const Band*)plane.bands)[x];
    const int64_t first = max_of(begin, b.k0), last = min_of(end, b.k1) - 1;
    const int64_t low = max_of(b.q0, first - b.hi), high = min_of(b.q1, last - b.lo + 1);
    if (first <= last && low < high) r = {min_of(r.begin, low), max_of(r.end, high)};
  }
  return r;
}

}  // namespace TW_NAMESPACE
