/* convolution_layout: how one sharded convolution lies on its groups, worked out.
 *
 * What the caller says (hc_convolution) and what the tensors are gives, for each spatial dimension, the window, the
 * shards of input and output that this rank holds, and, for the exchange at hand, the extents of all ranks. Both paths
 * of convolution.c start here, so that what travels is the same for both.
 *
 * A dimension is *planned* when the rule has to look at it: it is sharded, periodic, or padded in a way that ATen's
 * convolution does not know (unevenly, negatively). The others are left to ATen.
 */
#ifndef HC_CONVOLUTION_LAYOUT_H
#define HC_CONVOLUTION_LAYOUT_H

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

/* One spatial dimension. */
typedef struct hc_layout_dim {
  bool planned;
  hc_window window;
  hc_axis in, out;             /* the input's and the output's place on the group */
  hc_interval in_own, out_own; /* this rank's shards of them */
  hc_interval *extents;        /* owned: one per rank, for the exchange at hand; NULL unless planned */
  hc_fit fit;                  /* of this rank, for the exchange at hand */
} hc_layout_dim;

typedef struct hc_layout {
  int64_t nspatial;
  hc_layout_dim dims[HC_MAX_SPATIAL];
  hc_shape input, weight, out; /* local */
} hc_layout;

/* Checks the tensors against each other and the shards. bias may be NULL. Also after a failure: hc_layout_free. */
hc_code hc_layout_init(const hc_convolution *conv, AtenTensorHandle input, AtenTensorHandle weight,
                       AtenTensorHandle bias, hc_layout *layout, hc_status *status);
void hc_layout_free(hc_layout *layout);

/* Which window map the next exchange follows, in all planned dimensions: the big side's extents for strips of the
 * small side (exact, so that the local convolution pads nothing), or the small side's extents for strips of the big
 * side. The small side is a convolution's output, and a transposed convolution's input. */
void hc_layout_use_reads(hc_layout *layout);
void hc_layout_use_fits(hc_layout *layout);

/* Exchanges one planned dimension after the other, but for spatial dimension `skipped` (-1: none). The local
 * convolution's paddings come out in `params`, that of the skipped dimension as 0. `tensor` is the local input, or else
 * the local output gradient. out: owned by the caller. */
hc_code hc_layout_assemble(const hc_layout *layout, AtenTensorHandle tensor, bool of_input, int64_t skipped,
                           hc_conv_params *params, const char *op, AtenTensorHandle *out, hc_status *status);

#endif
