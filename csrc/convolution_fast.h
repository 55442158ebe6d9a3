/* convolution_fast: the sharded convolution without a copy of the activation.
 *
 *   own shard, zero-padded        0 0 |a b c d e f g h| 0 0       convolved while the messages travel: wrong only in
 *                                      \_/         \_/            the outputs whose windows leave the shard
 *   strips  [halo | edge]     |y z|a b|               |g h|A B|   convolved next, both in one call: those outputs
 *
 * Forward: post the exchange; convolve the shard as it lies, zero-padded by the width of its left halo; wait; build the
 * strips that the boundary outputs read, stacked along the batch; convolve them; overwrite the boundary outputs.
 *
 * Backward: only the output gradient travels, as on the general path. While it does, the local backward pass of the own
 * output gradient gives both gradients except for the pairs (own input column, another rank's output column). Those
 * are the backward pass of strips: the received output gradients against the input columns that their windows read,
 * where columns that are not owned are zero. They belong to their owners, who have them in their own local pass: there
 * they meet zero padding here, which contributes nothing. The results are added to both gradients.
 *
 * One dimension is treated so, the last one that is not whole already; the ones before it are assembled. When it can be:
 * ATen's zero padding is symmetric, so the padding that makes the first local output this rank's first output also sets
 * their number. With left and right the widths by which the extent leaves the own shard, on either side, it is right iff
 *
 *     0 <= left <= dilation * (kernel - 1)    and    0 <= left - right < stride
 *
 * which holds for every odd kernel with the padding that keeps the size (stride 1), and for those with stride 2 on
 * shards of even width. Where the strips are most of the work, on shards of few columns or under a weight much larger
 * than the shard, the copy is cheaper and the general path is taken. All this is decided by integers that a rank knows;
 * the ranks may differ, since what they send and receive does not depend on it.
 */
#ifndef HC_CONVOLUTION_FAST_H
#define HC_CONVOLUTION_FAST_H

#include "convolution_layout.h"

typedef struct hc_fast {
  int64_t d;              /* the spatial dimension */
  int64_t padding;        /* of the local convolution */
  int64_t nstrips;        /* 0, 1 or 2 */
  hc_interval outputs[2]; /* of each strip, as the whole output counts them; all of one length */
} hc_fast;

/* Whether the fast path is taken, and how; the layout must be set to what the exchange follows: reads for the forward
 * pass, fits for the backward one. */
bool hc_fast_choose_forward(const hc_layout *layout, hc_fast *fast);
bool hc_fast_choose_backward(const hc_layout *layout, hc_fast *fast);

/* input: the local shard, assembled in the other planned dimensions, with `params` as hc_layout_assemble left them.
 * out: owned by the caller, in whatever memory format ATen gave it. */
hc_code hc_fast_forward(const hc_layout *layout, const hc_fast *fast, const hc_conv_params *params,
                        AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                        AtenTensorHandle *out, hc_status *status);
/* grad_output: the local one, assembled in the other planned dimensions; input: the local shard, without what nothing
 * touches in those. What isn't needed isn't computed, and stays NULL. */
hc_code hc_fast_backward(const hc_layout *layout, const hc_fast *fast, const hc_conv_params *params,
                         AtenTensorHandle grad_output, AtenTensorHandle input, AtenTensorHandle weight,
                         bool need_input, bool need_weight, AtenTensorHandle *grad_input,
                         AtenTensorHandle *grad_weight, hc_status *status);

/* ---- for tests ---- */

/* Which path is taken: "auto"; "general", always that one; "fast", wherever it can be, thin shards too. Returns whether
 * there is a path of that name. It is a matter of speed alone. */
bool hc_fast_set_path(const char *name);
const char *hc_fast_path(void);

/* How many local convolutions were run, of each kind, since the process began. */
typedef enum hc_fast_count {
  HC_COUNT_FORWARD_FAST,
  HC_COUNT_FORWARD_GENERAL,
  HC_COUNT_FORWARD_STRIPS,
  HC_COUNT_BACKWARD_FAST,
  HC_COUNT_BACKWARD_GENERAL,
  HC_COUNT_BACKWARD_STRIPS,
  HC_COUNTS,
} hc_fast_count;
int64_t hc_fast_counted(hc_fast_count which);

#endif
