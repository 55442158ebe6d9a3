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
 * A dimension is *planned* when the rule has to look at it: it is sharded, periodic, or padded in a way that ATen's
 * convolution does not know (unevenly, negatively). The others are left to ATen.
 *
 * This is the general path: one extended buffer, then one local convolution. hc_exchange_begin/_finish are the seam at
 * which a local convolution can run while the messages travel.
 */
#ifndef HC_CONVOLUTION_H
#define HC_CONVOLUTION_H

#include "halo.h"

typedef struct hc_convolution {
  hc_conv_params params; /* `padding` is ignored: pad_lo and pad_hi say it */
  int64_t pad_lo[HC_MAX_SPATIAL], pad_hi[HC_MAX_SPATIAL];
  bool periodic[HC_MAX_SPATIAL];
  /* How each spatial dimension lies on its group; world 1 where it is whole, then `size` is ignored. */
  int64_t size[HC_MAX_SPATIAL], world[HC_MAX_SPATIAL], rank[HC_MAX_SPATIAL];
  const char *group[HC_MAX_SPATIAL];
} hc_convolution;

/* The window of spatial dimension d. */
hc_window hc_convolution_window(const hc_convolution *conv, int64_t d, int64_t kernel);

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
