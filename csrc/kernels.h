/* kernels: the boxed kernels behind torch.ops.haloconv.*.
 *
 * A boxed kernel owns all its arguments and its results belong to the caller. It returns void, so an error is
 * raised by unwinding (aoti_torch_check), last of all: everything is freed before, since C frames have no
 * destructors. It may run on any thread, without the GIL.
 */
#ifndef HC_KERNELS_H
#define HC_KERNELS_H

#include "status.h"

/* Defines the ops and registers their kernels for CPU and CUDA tensors. Once per process. */
hc_code hc_kernels_register(hc_status *status);

#endif
