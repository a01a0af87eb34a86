// See threads.h. The pool is the process's own OpenMP runtime when its GOMP_parallel was handed over (torch's, so that torch.set_num_threads and
// its workers serve both); otherwise, and in a forked child, whose inherited pool has no threads, plain threads for the one call.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
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

char* thread_scratch(size_t bytes) {
  pthread_once(&scratch_once, make_scratch_key);
  Scratch* s = (Scratch*)pthread_getspecific(scratch_key);
  if (!s) {
    s = (Scratch*)calloc(1, sizeof(Scratch));
    if (!s || pthread_setspecific(scratch_key, s) != 0) {
      free(s);
      return nullptr;
    }
  }
  if (s->bytes < bytes) {
    free(s->memory);
    s->memory = allocate(bytes);
    s->bytes = s->memory ? bytes : 0;
  }
  return s->memory;
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int kMaxPhases = 4;
struct Job {
  const tw_phase* phases;
  int n_phases, threads;
  const void* context;
  size_t scratch_bytes;
  int64_t items;                             // of all phases
  alignas(64) int64_t next;                  // item of all phases, one after the other; what threads write has its own cache line
  alignas(64) int64_t finished[kMaxPhases];  // items of each phase
};

// How many items a thread takes at once: a quarter of its share of what is left of the phase, so that items of a microsecond do not fight over one
// counter and neighbours in memory go to one thread, while the last ones are dealt one by one.
int64_t next_items(const Job& job) {
  const int64_t next = __atomic_load_n(&job.next, __ATOMIC_RELAXED);
  int64_t end = 0;
  bool one_by_one = false;
  for (int p = 0; p < job.n_phases && end <= next; p++) {
    end += job.phases[p].items;
    one_by_one = job.phases[p].one_by_one;
  }
  const int64_t some = (end - next) / (4 * job.threads);
  return some > 1 && !one_by_one ? some : 1;
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
  const bool keep = job.scratch_bytes <= kKeepBytes;
  char* scratch = keep ? thread_scratch(job.scratch_bytes) : allocate(job.scratch_bytes);
  if (!scratch) return;
  FlushDenormals flush;
  int64_t first = 0;  // of the phase
  for (int p = 0; p < job.n_phases;) {
    const int64_t some = next_items(job);
    int64_t item = __atomic_fetch_add(&job.next, some, __ATOMIC_RELAXED);
    for (const int64_t end = least(item + some, job.items); item < end;) {
      while (item >= first + job.phases[p].items) first += job.phases[p++].items;
      if (p > 0) wait_for(job, p - 1);
      const int64_t stop = least(end, first + job.phases[p].items), begin = item;
      for (; item < stop; item++) job.phases[p].work(job.context, item - first, scratch);
      __atomic_fetch_add(&job.finished[p], stop - begin, __ATOMIC_RELEASE);
    }
    if (item >= job.items) break;
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
  Job job = {phases, n_phases, threads, context, (scratch_bytes + 4096) & ~(size_t)4095, items, 0, {0}};
  if (threads == 1)
    worker(&job);
  else if (gomp_parallel && owns_pool())
    gomp_parallel(worker, &job, (unsigned)threads, 0);
  else
    run_on_own_threads(job, threads);
  // A thread without memory leaves its share to the others; all of them failing leaves items undone.
  return job.next >= items ? TW_OK : TW_NO_MEMORY;
}

void tw_set_gomp_parallel(void* f) { gomp_parallel = (gomp_parallel_t)f; }
int tw_has_shared_pool(void) { return gomp_parallel != nullptr; }
