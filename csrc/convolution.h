/* convolution: the sharded convolution and its backward, any number of sharded spatial dimensions.
 *
 * Forward: each rank assembles the input that its output strip reads (one exchange per sharded dimension, on the
 * already extended tensor, so that corners come along) and convolves it. A transposed convolution is the same with
 * the other window map.
 *
 * Backward: every (input column, output column) pair belongs to the rank that owns the input column, for the weight
 * gradient as for the input gradient. So the halo of the *output gradient* is all that travels, the input is never
 * exchanged again, and no partial sums are sent. Summed over the ranks the weight gradients are the unsplit one's.
 * Periodic dimensions are the exception: a column there has several images, so the input's halo is fetched again and
 * its gradient reduced.
 *
 * Two paths lead there. The general one assembles one extended buffer and convolves that: it works for every window, at
 * the price of a copy of the activation. The fast one (convolution_fast.h) convolves the shard as it lies while the
 * messages travel, and mends the columns at its edges. Which is taken follows from integers, and each rank may decide
 * for itself: the messages are the same.
 */
#ifndef HC_CONVOLUTION_H
#define HC_CONVOLUTION_H

#include "convolution_layout.h"

/* input: the local shard, (N, C_in, ...). weight: whole. bias: (C_out,) or NULL. out: the local shard of the output,
 * in the memory format of the input. */
hc_code hc_convolution_forward(const hc_convolution *conv, AtenTensorHandle input, AtenTensorHandle weight,
                               AtenTensorHandle bias, AtenTensorHandle *out, hc_status *status);

typedef struct hc_convolution_grads {
  AtenTensorHandle input;  /* whole gradient of the local shard */
  AtenTensorHandle weight; /* this rank's part: to be summed over the ranks */
  AtenTensorHandle bias;   /* likewise */
} hc_convolution_grads;

/* What isn't needed isn't computed and stays NULL. The needs must be the same on every rank. */
hc_code hc_convolution_backward(const hc_convolution *conv, AtenTensorHandle grad_output,
                                AtenTensorHandle input, AtenTensorHandle weight, bool need_input,
                                bool need_weight, bool need_bias, hc_convolution_grads *grads,
                                hc_status *status);

#endif
