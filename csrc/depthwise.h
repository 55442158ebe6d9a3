/* depthwise: depthwise convolution on the CPU, over raw pointers.
 *
 * ATen's depthwise weight gradient is many times slower than its forward pass, and no ATen convolution reads an input
 * that lies in several places. This one does the three passes of a depthwise convolution (a channel multiplier of 1, up
 * to three spatial dimensions, any window) at about the speed of its multiplications, and reads what it reads in up to
 * three pieces along one dimension:
 *
 *     base[0] |left halo|  base[1] |own shard ...........|  base[2] |right halo|
 *         bounds[0]     bounds[1]                     bounds[2]           bounds[3]
 *
 * each with strides of its own, or missing, which is zeros, as everything outside of [bounds[0], bounds[3]) is. So a
 * sharded convolution gives received messages as they are, and assembles nothing. Columns are counted from wherever the
 * caller likes, outputs from where column 0 says: output o reads the inputs o * stride - padding + k * dilation.
 *
 * What is computed is a box of outputs, so that the boundary can come after the interior. With one shard's own columns
 * as the input and the output gradient in pieces, the weight gradient is the sum over the pairs (own input column,
 * anyone's output column).
 *
 * How: a tile of the input goes, converted, into a small zero-padded buffer (tens of kilobytes), whose pixels are vectors
 * of adjacent channels, or of adjacent columns, whichever fills the lanes. The loops over taps (depthwise_simd_loops.h)
 * know neither layouts nor borders nor dtypes. Results depend on the sizes alone, not on the number of threads. float32
 * is summed in float32 (the weight gradient tile by tile, the tiles in float64), bfloat16 in float32, float64 in float64.
 */
#ifndef HC_DEPTHWISE_H
#define HC_DEPTHWISE_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

typedef enum hc_depthwise_dtype {
  HC_DEPTHWISE_FLOAT32,
  HC_DEPTHWISE_FLOAT64,
  HC_DEPTHWISE_BFLOAT16,
  HC_DEPTHWISE_DTYPES,
} hc_depthwise_dtype;

/* All three spatial dimensions are always there: depth, height, width; those a tensor lacks have size 1 and kernel 1. */
enum { HC_DEPTHWISE_SPATIAL = 3, HC_DEPTHWISE_PIECES = 3 };

typedef struct hc_depthwise {
  hc_depthwise_dtype dtype; /* of all tensors */
  int64_t batch, channels;
  int64_t kernel[HC_DEPTHWISE_SPATIAL], stride[HC_DEPTHWISE_SPATIAL], dilation[HC_DEPTHWISE_SPATIAL];
  int64_t padding[HC_DEPTHWISE_SPATIAL]; /* at the low end, and may be negative: the high end's follows */
} hc_depthwise;

/* What is read. Borrowed. Strides count elements, in the order N, C, D, H, W; any are right, also 0. */
typedef struct hc_depthwise_source {
  int64_t dim;                             /* the spatial dimension of the pieces: 0, 1 or 2 */
  const void *base[HC_DEPTHWISE_PIECES];   /* a piece's first element; NULL: the piece is zeros */
  int64_t bounds[HC_DEPTHWISE_PIECES + 1]; /* piece i covers [bounds[i], bounds[i + 1]) of `dim` */
  int64_t strides[HC_DEPTHWISE_PIECES][5];
  int64_t sizes[HC_DEPTHWISE_SPATIAL]; /* the other dimensions cover [0, size) */
} hc_depthwise_source;

/* What is written: the box [begin, end) of each spatial dimension. `base` is where index 0 is, whether or not it is in
 * the box. */
typedef struct hc_depthwise_target {
  void *base;
  int64_t strides[5];
  int64_t begin[HC_DEPTHWISE_SPATIAL], end[HC_DEPTHWISE_SPATIAL];
} hc_depthwise_target;

/* (C, 1, kernel...): strides of C and of the three spatial dimensions. */
typedef struct hc_depthwise_weight {
  void *base;
  int64_t strides[1 + HC_DEPTHWISE_SPATIAL];
} hc_depthwise_weight;

/* Whether the window is one that is worked out here: false for spans so wide that no tile of them is small. */
bool hc_depthwise_fits(const hc_depthwise *conv);

/* bias: NULL, or one number a channel, bias_stride elements apart. */
hc_code hc_depthwise_forward(const hc_depthwise *conv, const hc_depthwise_source *input,
                             const hc_depthwise_weight *weight, const void *bias, int64_t bias_stride,
                             const hc_depthwise_target *output, hc_status *status);
hc_code hc_depthwise_input_gradient(const hc_depthwise *conv, const hc_depthwise_source *grad_output,
                                    const hc_depthwise_weight *weight, const hc_depthwise_target *grad_input,
                                    hc_status *status);
/* Over the outputs in the box from `begin` to `end`. add: to what grad_weight holds. */
hc_code hc_depthwise_weight_gradient(const hc_depthwise *conv, const hc_depthwise_source *input,
                                     const hc_depthwise_source *grad_output, const int64_t *begin,
                                     const int64_t *end, bool add, const hc_depthwise_weight *grad_weight,
                                     hc_status *status);

#endif
