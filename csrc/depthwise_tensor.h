/* depthwise_tensor: when a convolution of tensors is one for depthwise.c, and running it there.
 *
 * hc_tensor_convolution and its backward ask here first. What can be run is a depthwise convolution on the CPU, of
 * float32, float64 or bfloat16, without elements that are missing; which of those are faster here than by ATen is a rule
 * in integers, found with benchmarks/depthwise.py. The environment variable HALOCONV_DEPTHWISE says "auto", that rule;
 * "off"; or "on", all that can be run.
 */
#ifndef HC_DEPTHWISE_TENSOR_H
#define HC_DEPTHWISE_TENSOR_H

#include "depthwise.h"
#include "tensor.h"

/* The three passes, as a bit mask. */
enum { HC_DEPTHWISE_FORWARD = 1, HC_DEPTHWISE_OF_INPUT = 2, HC_DEPTHWISE_OF_WEIGHT = 4 };

/* Whether `passes` of this convolution are for depthwise.c; then `conv` is filled in. other: the bias or the output
 * gradient, or NULL. */
bool hc_depthwise_takes(const hc_shape *input, const hc_shape *weight, const hc_shape *other,
                        const hc_conv_params *params, int passes, hc_depthwise *conv);
/* The rule of "auto". channels_last: the activation's memory format; size: its spatial sizes; threads don't matter. */
bool hc_depthwise_wins(const hc_depthwise *conv, bool channels_last, const int64_t *size, int passes);

/* A tensor as one piece, its columns counted from 0; as what is written; as a weight. */
hc_code hc_depthwise_source_of(AtenTensorHandle tensor, const hc_shape *shape, hc_depthwise_source *source,
                               hc_status *status);
hc_code hc_depthwise_target_of(AtenTensorHandle tensor, const hc_shape *shape, hc_depthwise_target *target,
                               hc_status *status);
hc_code hc_depthwise_weight_of(AtenTensorHandle tensor, const hc_shape *shape, hc_depthwise_weight *weight,
                               hc_status *status);

/* As hc_tensor_convolution and hc_tensor_convolution_backward, where taken; otherwise `out`, or all that is left to be
 * computed, stays NULL. */
hc_code hc_depthwise_try_forward(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                                 const hc_conv_params *params, AtenTensorHandle *out, hc_status *status);
hc_code hc_depthwise_try_backward(AtenTensorHandle grad_output, AtenTensorHandle input,
                                  AtenTensorHandle weight, const hc_conv_params *params, bool need_input,
                                  bool need_weight, AtenTensorHandle *grad_input,
                                  AtenTensorHandle *grad_weight, hc_status *status);

/* ---- for tests ---- */

/* "auto", "off" or "on". Returns whether there is such a mode. */
bool hc_depthwise_set_mode(const char *name);
const char *hc_depthwise_mode(void);
/* How many of a pass (HC_DEPTHWISE_FORWARD, ...) were run by depthwise.c since the process began. */
int64_t hc_depthwise_counted(int pass);

#endif
