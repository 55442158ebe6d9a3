/* allocations: counts the bytes that the C library's allocator has handed out, and their peak.
 *
 * Loaded with LD_PRELOAD into a process whose memory a test measures. It sees what no profiler does: ATen's scratch
 * buffers and the C core's. Only blocks of LEAST bytes and more count, so that Python's objects, of which there are
 * millions, stay out; an activation is far above that.
 *
 *   allocations_mark()  the peak starts over from what is alive now, and so do all counts
 *   allocations_peak()  the most that was alive since, above what was at the mark
 *   allocations_alive() what is alive now, above what was at the mark
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stddef.h>
#include <string.h>

enum { LEAST = 1 << 16 };

static long alive, peak, at_mark;

static void *(*real_malloc)(size_t);
static void *(*real_calloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static int (*real_posix_memalign)(void **, size_t, size_t);
static void *(*real_memalign)(size_t, size_t);
static void (*real_free)(void *);

/* dlsym itself allocates before the real functions are known: from here, and that is never freed. */
static char early[1 << 16];
static size_t early_used;

static void *early_alloc(size_t size) {
  void *block = early + early_used;
  early_used += (size + 15) & ~(size_t)15;
  return early_used <= sizeof early ? block : NULL;
}

static int is_early(const void *block) {
  return (const char *)block >= early && (const char *)block < early + sizeof early;
}

static void find(void) {
  static int finding;
  if (real_free == NULL && !finding) {
    finding = 1;
    *(void **)&real_malloc = dlsym(RTLD_NEXT, "malloc");
    *(void **)&real_calloc = dlsym(RTLD_NEXT, "calloc");
    *(void **)&real_realloc = dlsym(RTLD_NEXT, "realloc");
    *(void **)&real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    *(void **)&real_memalign = dlsym(RTLD_NEXT, "memalign");
    *(void **)&real_free = dlsym(RTLD_NEXT, "free");
    finding = 0;
  }
}

static void count(void *block, long sign) {
  const long size = block == NULL ? 0 : (long)malloc_usable_size(block);
  if (size >= LEAST) {
    const long now = __atomic_add_fetch(&alive, sign * size, __ATOMIC_RELAXED);
    long before = __atomic_load_n(&peak, __ATOMIC_RELAXED);
    while (now > before &&
           !__atomic_compare_exchange_n(&peak, &before, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
}

void allocations_mark(void);
long allocations_peak(void);
long allocations_alive(void);

void allocations_mark(void) {
  at_mark = __atomic_load_n(&alive, __ATOMIC_RELAXED);
  __atomic_store_n(&peak, at_mark, __ATOMIC_RELAXED);
}

long allocations_peak(void) { return __atomic_load_n(&peak, __ATOMIC_RELAXED) - at_mark; }

long allocations_alive(void) { return __atomic_load_n(&alive, __ATOMIC_RELAXED) - at_mark; }

void *malloc(size_t size) {
  find();
  if (real_malloc == NULL) {
    return early_alloc(size);
  }
  void *block = real_malloc(size);
  count(block, 1);
  return block;
}

void *calloc(size_t items, size_t size) {
  find();
  if (real_calloc == NULL) {
    return early_alloc(items * size); /* static memory: zero */
  }
  void *block = real_calloc(items, size);
  count(block, 1);
  return block;
}

void *realloc(void *block, size_t size) {
  find();
  if (is_early(block)) {
    void *copy = malloc(size);
    if (copy != NULL) {
      const size_t most = (size_t)(early + sizeof early - (char *)block);
      memcpy(copy, block, size < most ? size : most);
    }
    return copy;
  }
  count(block, -1);
  void *moved = real_realloc(block, size);
  count(moved == NULL && size > 0 ? block : moved, 1);
  return moved;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  find();
  const int error = real_posix_memalign(out, alignment, size);
  count(error == 0 ? *out : NULL, 1);
  return error;
}

void *memalign(size_t alignment, size_t size) {
  find();
  void *block = real_memalign(alignment, size);
  count(block, 1);
  return block;
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

void free(void *block) {
  find();
  if (!is_early(block) && real_free != NULL) {
    count(block, -1);
    real_free(block);
  }
}
