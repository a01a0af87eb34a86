// See threads.h. The pool is the process's own OpenMP runtime when its GOMP_parallel was handed over (torch's, so that torch.set_num_threads and
// its workers serve both); otherwise, and in a forked child, whose inherited pool has no threads, plain threads for the one call.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tilewise_cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

typedef void (*gomp_parallel_t)(void (*)(void*), void*, unsigned, unsigned);
gomp_parallel_t gomp_parallel = nullptr;
pid_t pool_owner = 0;  // the process that runs the shared pool; 0: nobody yet

// Freed at thread exit; larger requests are not kept.
constexpr size_t kKeepBytes = (size_t)8 << 20;
struct Scratch {
  char* memory;
  size_t bytes;
  int share;  // of a job, that the thread begins with
};
pthread_key_t scratch_key;
pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
void free_scratch(void* p) {
  free(((Scratch*)p)->memory);
  free(p);
}
void make_scratch_key() { pthread_key_create(&scratch_key, free_scratch); }

char* allocate(size_t bytes) {
  void* p = nullptr;
  return posix_memalign(&p, 64, bytes) == 0 ? (char*)p : nullptr;
}

// What the thread keeps; null where there is no memory for it.
Scratch* thread_scratch() {
  pthread_once(&scratch_once, make_scratch_key);
  Scratch* s = (Scratch*)pthread_getspecific(scratch_key);
  if (s) return s;
  s = (Scratch*)calloc(1, sizeof(Scratch));
  if (s) s->share = 1;
  if (s && pthread_setspecific(scratch_key, s) == 0) return s;
  free(s);
  return nullptr;
}

char* kept_memory(Scratch* s, size_t bytes) {
  if (s->bytes < bytes) {
    free(s->memory);
    s->memory = allocate(bytes);
    s->bytes = s->memory ? bytes : 0;
  }
  return s->memory;
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int kMaxPhases = 4, kMaxShares = 64;

// Items of a phase that one thread is to begin with. Whoever has done its own helps with the others'.
struct alignas(64) Share {
  int64_t next, end;
};
struct Job {
  const tw_phase* phases;
  int n_phases, threads, shares;
  const void* context;
  size_t scratch_bytes;
  alignas(64) int64_t finished[kMaxPhases];  // items of each phase; what threads write has its own cache line
  alignas(64) char taken[kMaxShares];        // shares that have a thread
  Share share[kMaxPhases][kMaxShares];
};

// Each thread begins with an equal share, neighbours in order; where items wait for others all is one share.
void deal(Job& job) {
  for (int p = 0; p < job.n_phases; p++) {
    const int64_t items = job.phases[p].items, shares = job.phases[p].one_by_one ? 1 : job.shares;
    job.finished[p] = 0;
    for (int64_t s = 0; s < shares; s++) job.share[p][s] = {items * s / shares, items * (s + 1) / shares};
  }
  memset(job.taken, 0, (size_t)job.shares);
}

// The share of a thread: the one that it took last time if it is free, because what lies in its cache is its part of the tensors. (The caller takes
// the first, as it does in torch's own operators.)
int take_share(Job& job, Scratch* kept) {
  int s = (kept ? kept->share : 0) % job.shares;
  for (int tries = 1; tries < job.shares && __atomic_exchange_n(&job.taken[s], (char)1, __ATOMIC_RELAXED); tries++) s = (s + 1) % job.shares;
  if (kept) kept->share = s;
  return s;
}

// How many items a thread takes at once: a quarter of what is left of the share, so that items of a microsecond do not fight over one counter and
// neighbours in memory go to one thread, while the last ones are dealt one by one.
int64_t take_items(Share& share, bool one_by_one, int64_t* first) {
  const int64_t left = share.end - __atomic_load_n(&share.next, __ATOMIC_RELAXED);
  if (left <= 0) return 0;
  const int64_t some = left > 4 && !one_by_one ? left / 4 : 1;
  *first = __atomic_fetch_add(&share.next, some, __ATOMIC_RELAXED);
  return least(some, share.end - *first);
}

// Denormals are flushed while the kernel runs: they carry nothing here and cost a hundred cycles each on some processors.
struct FlushDenormals {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(saved | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved); }
#endif
};

// Items are handed out in order and each thread works in order, so the first unfinished one never waits: this ends.
void wait_for(const Job& job, int phase) {
  for (int spins = 0; __atomic_load_n(&job.finished[phase], __ATOMIC_ACQUIRE) < job.phases[phase].items; spins++) {
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (spins % 256 == 255) sched_yield();
  }
}

void worker(void* p) {
  Job& job = *(Job*)p;
  Scratch* kept = thread_scratch();
  const bool keep = job.scratch_bytes <= kKeepBytes;
  char* scratch = !keep ? allocate(job.scratch_bytes) : kept ? kept_memory(kept, job.scratch_bytes) : nullptr;
  if (!scratch) return;
  FlushDenormals flush;
  const int mine = take_share(job, kept);
  for (int p = 0; p < job.n_phases; p++) {
    const tw_phase& phase = job.phases[p];
    if (phase.items == 0) continue;
    for (int before = 0; before < p; before++) wait_for(job, before);
    const int shares = phase.one_by_one ? 1 : job.shares;
    for (int s = 0; s < shares; s++) {
      Share& share = job.share[p][(mine + s) % shares];
      int64_t item, some;
      while ((some = take_items(share, phase.one_by_one, &item)) > 0) {
        for (int64_t end = item + some; item < end; item++) phase.work(job.context, item, scratch);
        __atomic_fetch_add(&job.finished[p], some, __ATOMIC_RELEASE);
      }
    }
  }
  if (!keep) free(scratch);
}

void* thread_main(void* p) {
  worker(p);
  return nullptr;
}

void run_on_own_threads(Job& job, int threads) {
  pthread_t* ids = (pthread_t*)malloc(sizeof(pthread_t) * (size_t)threads);
  int started = 0;
  if (ids)
    while (started < threads - 1 && pthread_create(&ids[started], nullptr, thread_main, &job) == 0) started++;
  worker(&job);
  for (int t = 0; t < started; t++) pthread_join(ids[t], nullptr);
  free(ids);
}

// True for the process that first asked: GNU OpenMP's threads do not survive a fork.
bool owns_pool() {
  const pid_t me = getpid();
  pid_t owner = __atomic_load_n(&pool_owner, __ATOMIC_ACQUIRE);
  if (owner == 0 && __atomic_compare_exchange_n(&pool_owner, &owner, me, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return true;
  return owner == me;
}

}  // namespace

int tw_run(const tw_phase* phases, int n_phases, int threads, size_t scratch_bytes, const void* context) {
  int64_t items = 0, widest = 0;
  for (int p = 0; p < n_phases; p++) {
    items += phases[p].items;
    widest = phases[p].items > widest ? phases[p].items : widest;
  }
  if (items == 0) return TW_OK;
  if (threads > widest) threads = (int)widest;
  if (threads < 1) threads = 1;
  Job job;  // mostly not looked at, and so not cleared
  job.phases = phases, job.n_phases = n_phases, job.threads = threads, job.shares = threads < kMaxShares ? threads : kMaxShares;
  job.context = context, job.scratch_bytes = (scratch_bytes + 4096) & ~(size_t)4095;
  deal(job);
  if (Scratch* kept = thread_scratch()) kept->share = 0;
  if (threads == 1)
    worker(&job);
  else if (gomp_parallel && owns_pool())
    gomp_parallel(worker, &job, (unsigned)threads, 0);
  else
    run_on_own_threads(job, threads);
  // A thread without memory leaves its share to the others; all of them failing leaves items undone.
  for (int p = 0; p < n_phases; p++)
    if (job.finished[p] < phases[p].items) return TW_NO_MEMORY;
  return TW_OK;
}

void tw_set_gomp_parallel(void* f) { gomp_parallel = (gomp_parallel_t)f; }
int tw_has_shared_pool(void) { return gomp_parallel != nullptr; }
