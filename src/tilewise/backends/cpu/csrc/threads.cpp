// See threads.h. The pool is the process's own OpenMP runtime when its GOMP_parallel was handed over (torch's, so that torch.set_num_threads and
// its workers serve both). Plain threads are started for the one call otherwise, where the pool's have small stacks, and in a forked child, whose
// inherited pool has no threads: whether the parent had called the kernel, torch alone, or not even loaded this file, a child cannot tell.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // pthread_getattr_np
#endif
#include "threads.h"

#include <fcntl.h>
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
pid_t pool_owner = 0;  // the process that runs the shared pool; 0: nobody yet, -1: nobody ever
bool narrow_pool = false;  // a thread of the pool had no room (OMP_STACKSIZE)

constexpr size_t kOwnStack = (size_t)1 << 20, kRoom = (size_t)64 << 10;  // bytes of our threads' stacks; of what a job takes, three times over

// Freed at thread exit; larger requests are not kept.
constexpr size_t kKeepBytes = (size_t)8 << 20;
struct Scratch {
  char* memory;
  size_t bytes;
  int share;  // of a job, that the thread begins with
  const char* stack;  // its lowest address; null where the system does not say
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

const char* lowest_of_stack() {
  void* lowest = nullptr;
#if defined(__GLIBC__)
  pthread_attr_t attributes;
  size_t bytes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return nullptr;
  if (pthread_attr_getstack(&attributes, &lowest, &bytes) != 0) lowest = nullptr;
  pthread_attr_destroy(&attributes);
#endif
  return (const char*)lowest;
}

// What the thread keeps; null where there is no memory for it.
Scratch* thread_scratch() {
  pthread_once(&scratch_once, make_scratch_key);
  Scratch* s = (Scratch*)pthread_getspecific(scratch_key);
  if (s) return s;
  s = (Scratch*)calloc(1, sizeof(Scratch));
  if (s) s->share = 1, s->stack = lowest_of_stack();
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

// Whether the rest of the thread's stack holds a job.
bool has_room(const Scratch* s) {
  return !s || !s->stack || (size_t)((const char*)__builtin_frame_address(0) - s->stack) >= kRoom;
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
  if (!has_room(kept)) return __atomic_store_n(&narrow_pool, true, __ATOMIC_RELAXED);
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

bool start(pthread_t* id, void* (*main)(void*), void* given) {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  const bool started = pthread_attr_setstacksize(&attributes, kOwnStack) == 0 && pthread_create(id, &attributes, main, given) == 0;
  pthread_attr_destroy(&attributes);
  return started;
}

void run_on_own_threads(Job& job, int threads) {
  pthread_t* ids = (pthread_t*)malloc(sizeof(pthread_t) * (size_t)threads);
  int started = 0;
  if (ids)
    while (started < threads - 1 && start(&ids[started], thread_main, &job)) started++;
  worker(&job);
  for (int t = 0; t < started; t++) pthread_join(ids[t], nullptr);
  free(ids);
}

// Whether this process was forked and has run no other program since: bit 0x40, PF_FORKNOEXEC, of the ninth field of its stat.
bool forked() {
  char text[512];
  const int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t bytes = read(file, text, sizeof text - 1);
  close(file);
  text[bytes > 0 ? bytes : 0] = 0;
  const char* at = strrchr(text, ')');  // behind the name, in which anything may stand
  for (int field = 0; at && field < 7; field++) at = strchr(at + 1, ' ');
  return at && (strtoul(at, nullptr, 10) & 0x40) != 0;
}

// True for the process that first asked, unless that was forked: GNU OpenMP's threads do not survive a fork.
bool owns_pool() {
  const pid_t me = getpid();
  pid_t owner = __atomic_load_n(&pool_owner, __ATOMIC_ACQUIRE);
  if (owner == 0) {
    const pid_t mine = forked() ? -1 : me;
    if (__atomic_compare_exchange_n(&pool_owner, &owner, mine, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) owner = mine;
  }
  return owner == me;
}

struct Run {
  const tw_phase* phases;
  int n_phases, threads;
  size_t scratch_bytes;
  const void* context;
  int status;
};

__attribute__((noinline)) void run_here(Run& run) {  // a job is 16 KB of stack
  Job job;                                           // mostly not looked at, and so not cleared
  job.phases = run.phases, job.n_phases = run.n_phases, job.threads = run.threads;
  job.shares = run.threads < kMaxShares ? run.threads : kMaxShares;
  job.context = run.context, job.scratch_bytes = (run.scratch_bytes + 4096) & ~(size_t)4095;
  deal(job);
  if (Scratch* kept = thread_scratch()) kept->share = 0;
  if (run.threads == 1)
    worker(&job);
  else if (gomp_parallel && !__atomic_load_n(&narrow_pool, __ATOMIC_RELAXED) && owns_pool())
    gomp_parallel(worker, &job, (unsigned)run.threads, 0);
  else
    run_on_own_threads(job, run.threads);
  // A thread without memory leaves its share to the others; all of them failing leaves items undone.
  run.status = TW_OK;
  for (int p = 0; p < run.n_phases; p++)
    if (job.finished[p] < run.phases[p].items) run.status = TW_NO_MEMORY;
}

void* run_apart(void* run) {
  run_here(*(Run*)run);
  return nullptr;
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
  Run run = {phases, n_phases, threads < 1 ? 1 : threads, scratch_bytes, context, TW_NO_MEMORY};
  pthread_t apart;
  if (has_room(thread_scratch()))
    run_here(run);
  else if (start(&apart, run_apart, &run))
    pthread_join(apart, nullptr);
  return run.status;
}

void tw_set_gomp_parallel(void* f) { gomp_parallel = (gomp_parallel_t)f; }
int tw_has_shared_pool(void) { return gomp_parallel != nullptr; }
