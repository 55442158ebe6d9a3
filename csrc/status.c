/* status: see status.h. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "torch_abi.h"

hc_code hc_fail(hc_status *status, hc_code code, const char *format, ...) {
  if (status->code == HC_OK) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(status->message, sizeof status->message, format, arguments);
    va_end(arguments);
    status->code = code;
  }
  return status->code;
}

hc_code hc_check_torch(hc_status *status, int32_t error, const char *call) {
  if (error == 0) {
    return status->code;
  }
  /* Before 2.13 libtorch only prints the reason to stderr, and this function does not exist. */
  const char *reason = NULL;
  if (torch_exception_get_what_without_backtrace != NULL) {
    reason = torch_exception_get_what_without_backtrace();
  }
  if (reason == NULL || reason[0] == '\0') {
    reason = "libtorch wrote the reason to stderr";
  }
  /* An error of a Python op ends in a Python traceback, which is not for this message. */
  const char *traceback = strstr(reason, "\n\nAt:");
  const int length = traceback != NULL ? (int)(traceback - reason) : (int)strlen(reason);
  return hc_fail(status, HC_ERROR_TORCH, "%.*s [in %.60s]", length, reason, call);
}

#ifdef HC_FAULTS
static int64_t calls_until_fault; /* tests only, single-threaded by construction */

void hc_fault_arm(int64_t n) { calls_until_fault = n; }

int hc_fault_due(void) { return calls_until_fault > 0 && --calls_until_fault == 0; }
#endif
