/* resize: which inputs does an output of a resampling read, and with which weights? One dimension at a time.
 *
 * Every resampling of ATen is separable: the result is a sum, along each dimension, of a few *taps*, an input
 * index with a weight. What the taps are follows from public numbers (sizes, mode, scale), so each rank knows what
 * every rank reads. No torch, no communication.
 *
 *   input    |  0  |  1  |  2  |  3  |  4  |  5  |      linear, 6 to 4: ratio 6/4, output 2 lies at
 *                             \    /                    1.5 * (2 + 0.5) - 0.5 = 3.25: taps (3, 0.75), (4, 0.25)
 *   output   |    0   |    1   |    2   |    3   |
 *
 * The taps are ATen's own, not those of the textbook: a sharded op must pick the pixel that the unsharded one picks,
 * and where an index is a rounded product, the last bit decides. So the arithmetic follows ATen's step by step,
 * each step rounded to float for float, bfloat16 and half tensors (`single_precision`), and not for double ones.
 * What a reader would not expect, and what tests/test_resize_plan.py holds against ATen itself:
 *
 * 1. The ratio is in/out; 1/scale when a scale was given; (in - 1)/(out - 1) with align_corners, scale or no scale.
 * 2. The CPU has two kernels for nearest and nearest-exact, and they disagree. One (`channels_last`) rounds the
 *    ratio to float whatever the dtype, and, in nearest, ignores the scale when out is in or 2*in. ATen takes it for
 *      4-D  when (input contiguous in channels_last and more than 3 channels) or out_h + out_w <= 128
 *      5-D  when input contiguous in channels_last_3d and more than 3 channels
 *    and the other for all else. The sizes in this are those of the whole tensor, never of a shard.
 * 3. Linear and the two antialiased modes copy a dimension whose size does not change, whatever the scale; cubic
 *    and nearest-exact use the scale, and so does the other kernel of nearest.
 * 4. Index and fraction of linear and cubic come from a floor in float, also for double.
 * 5. The antialiased modes centre at ratio * (o + 0.5) even with align_corners, drop the taps beyond the border and
 *    divide by the sum of the rest. Their cubic has A = -0.5, the plain one -0.75.
 * 6. The compiler of torch's binaries turned a * b + c into one instruction, rounded once, wherever the machine has
 *    it (`fused`): on x86 unless torch.backends.cpu.get_cpu_capability() is "DEFAULT". nearest-exact from 2 to 41 in
 *    float picks another input with it than without.
 * 7. What is followed is the forward pass. ATen's backward pass of nearest and nearest-exact takes the indices of
 *    the kernel `channels_last` in every layout, so that it is not always the adjoint; with these taps it can be.
 *    And ATen's antialiased modes resize dimension 2 wrongly where dimension 3 of a 4-D result is 1, all rows alike:
 *    here they come out right.
 *
 * A tap that ATen clamps to the border stays a tap of its own: an index may occur several times in a row.
 * A tap of weight 0 is not read: its index is that of another tap of its row, so that all of a row lies within
 * hc_resize_reads. (ATen multiplies some of them, and then 0 * inf is nan there. Here they can be skipped.)
 */
#ifndef HC_RESIZE_H
#define HC_RESIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "shard.h"
#include "status.h"

typedef enum hc_resize_mode {
  HC_RESIZE_NEAREST,
  HC_RESIZE_NEAREST_EXACT,
  HC_RESIZE_LINEAR,
  HC_RESIZE_CUBIC,
  HC_RESIZE_LINEAR_AA,
  HC_RESIZE_CUBIC_AA,
  HC_RESIZE_ADAPTIVE, /* bins of an adaptive average pooling */
} hc_resize_mode;

typedef struct hc_resize {
  hc_resize_mode mode;
  int64_t in, out;
  bool align_corners;    /* linear, cubic and the antialiased modes */
  double scale;          /* ATen's scale argument; 0 or less: none */
  bool single_precision; /* anything but double */
  bool channels_last;    /* nearest, nearest-exact: which kernel, see 2 above */
  bool fused;            /* see 6 above */
} hc_resize;

/* "nearest", "nearest-exact", "linear", "cubic", "linear-aa", "cubic-aa" or "adaptive". */
hc_code hc_resize_mode_parse(const char *name, hc_resize_mode *mode, hc_status *status);

/* Refuses what cannot be: sizes outside [1, 2^30], align_corners or a scale where the mode has none, a scale outside
 * [2^-30, 2^30]. Everything below expects what has passed here. */
hc_code hc_resize_check(const hc_resize *r, hc_status *status);

/* Taps in each row, the same for all outputs; shorter rows end in taps of weight 0. At most r->in, or 4. */
int64_t hc_resize_tap_count(const hc_resize *r);

/* The rows of the outputs `out`, which lies in [0, r->out): `index` and `weight` have room for `taps` =
 * hc_resize_tap_count() of each output. Ascending within a row, and all indices in [0, r->in). */
void hc_resize_taps(const hc_resize *r, hc_interval out, int64_t taps, int64_t *index, double *weight);

/* The smallest interval of inputs that holds every index of the rows of `out`; empty for an empty `out`. */
hc_interval hc_resize_reads(const hc_resize *r, hc_interval out);

#endif
