/* fake_memory: tells the stand-in what is allocated and freed. Loaded with LD_PRELOAD, apart from fake_cuda, whose names
 * must not get between torch and the real libraries. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void (*fake_memory_on_free)(const void *block, size_t size);
EXPORT void (*fake_memory_on_allocation)(void);

extern void __libc_free(void *block);

EXPORT void free(void *block) {
  void (*hook)(const void *, size_t) = __atomic_load_n(&fake_memory_on_free, __ATOMIC_ACQUIRE);
  if (hook != NULL && block != NULL) {
    hook(block, malloc_usable_size(block));
  }
  __libc_free(block);
}

/* With which torch allocates tensors. */
EXPORT int posix_memalign(void **block, size_t alignment, size_t size) {
  static int (*real)(void **, size_t, size_t);
  void (*hook)(void) = __atomic_load_n(&fake_memory_on_allocation, __ATOMIC_ACQUIRE);
  if (real == NULL) {
    *(void **)&real = dlsym(RTLD_NEXT, "posix_memalign");
  }
  if (hook != NULL) {
    hook();
  }
  return real(block, alignment, size);
}
