/* status: how a function in csrc/ says that it failed.
 *
 * Every function that can fail returns an hc_code and takes an hc_status, a buffer that the caller owns
 * and that holds the text for a person. The first failure wins: whoever fails later, during the cleanup,
 * say, does not overwrite the reason. Nothing in here prints, exits or unwinds. A Python error is raised in
 * one place only (module.c), after everything has been freed.
 *
 * The shape of a function that owns things:
 *
 *     AtenTensorHandle strip = NULL;
 *     HC_TRY(hc_tensor_empty(&shape, &strip, status));
 *     HC_TRY_TORCH(status, aoti_torch_zero_(strip));
 *   done:
 *     hc_tensor_free(&strip);
 *     return status->code;
 *
 * A build with -DHC_FAULTS lets a test make the n-th checked call fail (hc_fault_arm), which is how the
 * error paths are walked one by one.
 */
#ifndef HC_STATUS_H
#define HC_STATUS_H

#include <stdint.h>

enum { HC_MESSAGE_SIZE = 1024 };

typedef enum hc_code {
  HC_OK = 0,
  HC_ERROR_ARGUMENT, /* the caller asked for something that does not fit */
  HC_ERROR_MEMORY,   /* an allocation failed */
  HC_ERROR_TORCH,    /* a call into libtorch failed */
  HC_ERROR_CUDA,     /* a kernel could not be started, or one before it failed */
} hc_code;

typedef struct hc_status {
  hc_code code;
  char message[HC_MESSAGE_SIZE];
} hc_status;

/* Records a failure, unless one is recorded already; returns the code that is recorded now. */
hc_code hc_fail(hc_status *status, hc_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Turns the return value of a libtorch call (0 is success) into a status. `call` is its source text. */
hc_code hc_check_torch(hc_status *status, int32_t error, const char *call);

#ifdef HC_FAULTS
/* Makes the n-th checked call from now on fail (n = 1 is the next one); 0 disarms. */
void hc_fault_arm(int64_t n);
/* Whether the call about to be made has to fail. */
int hc_fault_due(void);
/* Fails in place of the call that follows, which may be one that takes its arguments over: they are still the
 * caller's then. */
#define HC_FAULT_POINT(status)                                   \
  do {                                                           \
    if (hc_fault_due()) {                                        \
      (void)hc_fail((status), HC_ERROR_TORCH, "injected fault"); \
      goto done;                                                 \
    }                                                            \
  } while (0)
#else
#define HC_FAULT_POINT(status) ((void)0)
#endif

/* Both jump to the function's `done:` label. */
#define HC_TRY(call)       \
  do {                     \
    if ((call) != HC_OK) { \
      goto done;           \
    }                      \
  } while (0)
#define HC_TRY_TORCH(status, call)                   \
  do {                                               \
    HC_FAULT_POINT(status);                          \
    HC_TRY(hc_check_torch((status), (call), #call)); \
  } while (0)

#endif
