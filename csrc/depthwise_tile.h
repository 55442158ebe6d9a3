/* depthwise_tile: how depthwise.c cuts its work into tiles, and the buffer that a tile's input is packed into.
 *
 * Both of the passes that write an activation are one sum: output index j * out_step + phase is the sum over the phase's
 * taps of weight[tap] * source[j * in_step + offset(tap)].
 *
 *   forward          out_step 1, in_step = stride, one phase: offset(k) = k * dilation - padding
 *   input gradient   out_step = stride, in_step 1: phase p has the taps k that stride divides p + padding - k * dilation
 *                    by, and offset(k) is the quotient
 *
 * A tile is a box of j. Its input is packed as rows[slice][row][line], where
 *
 *   lanes along channels   a line has a pixel of `lanes` channels for each column
 *   lanes along columns    a row has in_step lines, of every in_step-th column each, so that neighbours in a vector are
 *                          neighbouring outputs
 */
#ifndef HC_DEPTHWISE_TILE_H
#define HC_DEPTHWISE_TILE_H

#include "depthwise_simd.h"

/* Bounds of what a tile takes: a row, unless so many columns' reach is more; and all. */
enum { HC_TILE_ROW_BYTES = 40 << 10, HC_TILE_COLUMNS = 128, HC_TILE_BYTES_AT_MOST = 32 << 20 };

typedef struct hc_tile_dim {
  int64_t kernel, padding, dilation, stride;
  bool gradient;
  int64_t in_step, out_step;
  int64_t least, most;  /* the taps' offsets */
  int64_t begin, end;   /* of the outputs that are asked for */
  int64_t first, count; /* of j, over all phases */
  int64_t tile, ntiles; /* j in a tile, tiles */
  int64_t extent;       /* columns of the source that a tile reads */
} hc_tile_dim;

typedef struct hc_tiling {
  const hc_depthwise *conv;
  const hc_simd *simd;
  bool along_channels; /* what the lanes are */
  hc_tile_dim dims[HC_DEPTHWISE_SPATIAL];
  int64_t nblocks;                           /* of channels: `lanes` of them each, or one each */
  int64_t unit;                              /* numbers in a pixel: lanes or 1 */
  int64_t nlines, line, row, slice, numbers; /* lines in a row, and the length of each, in numbers */
} hc_tiling;

/* A tile of a source: [lo, hi) of each dimension, packed in rows of `nlines` lines of `line` pixels, zero where it is not
 * in the source. */
typedef struct hc_tile_box {
  int64_t lo[HC_DEPTHWISE_SPATIAL], hi[HC_DEPTHWISE_SPATIAL];
  int64_t nlines, line, row, slice;
} hc_tile_box;

/* Works a tiling out for the outputs from `begin` to `end`. strides: of the output, in elements, N, C, D, H, W. False:
 * there is none that is small. */
bool hc_tiling_init(const hc_depthwise *conv, bool gradient, const int64_t *begin, const int64_t *end,
                    const int64_t *strides, hc_tiling *tiling);
int64_t hc_tiling_ntiles(const hc_tiling *tiling);
/* The tile's box of j, cut to the whole. */
void hc_tiling_tile(const hc_tiling *tiling, int64_t index, int64_t *j_begin, int64_t *j_end);

/* Whether tap k is in `phase`, and its offset. */
bool hc_tile_tap(const hc_tile_dim *dim, int64_t phase, int64_t k, int64_t *offset);
/* The phase's part of [j_begin, j_end): whose outputs are asked for. */
void hc_tile_clip(const hc_tile_dim *dim, int64_t phase, int64_t *j_begin, int64_t *j_end);
/* Where in the packed tile the source columns least + (d, h, w) of j = 0 are. */
int64_t hc_tile_offset(const hc_tiling *tiling, int64_t d, int64_t h, int64_t w);

/* channel: the first of the block's `channels`, which are less than `lanes` in the last block. */
void hc_tile_pack(const hc_tiling *tiling, const hc_tile_box *box, const hc_depthwise_source *source,
                  int64_t image, int64_t channel, int64_t channels, void *packed);
/* The box's first number in the source itself, and box->row and box->slice those of the source, where that lies as a
 * packed one would, but for them; otherwise NULL, and the box as it was. */
const void *hc_tile_in_place(const hc_tiling *tiling, const hc_depthwise_source *source, int64_t image,
                             int64_t channel, hc_tile_box *box);

#endif
