/* stable: StableIValue, the 64-bit box in which libtorch passes arguments and results.
 *
 * Numbers lie in its low bytes; tensors, strings and lists are handles, owned by whoever holds the box. A callee
 * (a boxed kernel, or torch_call_dispatcher) takes over all its arguments. The free functions accept an empty
 * box (0) and leave an empty one.
 */
#ifndef HC_STABLE_H
#define HC_STABLE_H

#include "status.h"
#include "torch_abi.h"

/* Tensors. `from` makes a new reference and leaves the given handle alone; `to` passes the box's reference on. */
hc_code hc_stable_from_tensor(AtenTensorHandle tensor, StableIValue *out, hc_status *status);
AtenTensorHandle hc_stable_to_tensor(StableIValue value);
void hc_stable_free_tensor(StableIValue *value);

/* Integers and doubles. */
int64_t hc_stable_to_int(StableIValue value);
bool hc_stable_to_bool(StableIValue value);
double hc_stable_to_double(StableIValue value);

/* Lists. */
hc_code hc_stable_from_ints(const int64_t *items, int64_t count, StableIValue *out, hc_status *status);
hc_code hc_stable_from_tensors(const AtenTensorHandle *items, int64_t count, StableIValue *out,
                               hc_status *status);
/* Reads int[]: `*count` is set, at most `capacity` items are written, more is an error that names `what`. */
hc_code hc_stable_to_ints(StableIValue list, const char *what, int64_t capacity, int64_t *items,
                          int64_t *count, hc_status *status);
/* Reads a Tensor[] of none or one: a new reference, or NULL. */
hc_code hc_stable_to_optional_tensor(StableIValue list, AtenTensorHandle *out, hc_status *status);
void hc_stable_free_list(StableIValue *value);
void hc_stable_free_tensor_list(StableIValue *value); /* and the references in it */

/* Strings. */
/* Text as int[], one entry a byte: up to 2.13 the dispatcher does not free the strings that it is given. */
hc_code hc_stable_from_text(const char *text, StableIValue *out, hc_status *status);
hc_code hc_stable_to_string(StableIValue value, const char **borrowed, hc_status *status);
void hc_stable_free_string(StableIValue *value);

#endif
