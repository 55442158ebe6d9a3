/* depthwise: see depthwise.h. */
#include "depthwise.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "depthwise_tile.h"
#include "shard.h"
#include "torch_abi.h"

enum { ALIGNMENT = 64 };
/* Windows that are worked out here; and from how many multiplications on a second thread is of use. */
enum { REACH_AT_MOST = 1 << 20, TAPS_AT_MOST = 1 << 12, PHASES_AT_MOST = 1 << 10, PARALLEL_FROM = 1 << 17 };
/* The weight gradient of so many parts of the work is summed apart, in float64. */
enum { PARTIALS_WANTED = 64 };
/* Rows whose products with all taps are summed in one go: as many as stay in the first-level cache, and no fewer. */
enum { ROWS_BYTES = 32 << 10, ROWS_AT_ONCE = 16 };

static int64_t product(const int64_t *of) { return of[0] * of[1] * of[2]; }

bool hc_depthwise_fits(const hc_depthwise *conv) {
  int64_t taps = 1, phases = 1, bytes = 1;
  for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL; ++d) {
    if (conv->kernel[d] > TAPS_AT_MOST || conv->stride[d] > PHASES_AT_MOST ||
        conv->padding[d] > REACH_AT_MOST || conv->padding[d] < -REACH_AT_MOST ||
        (conv->kernel[d] > 1 && conv->dilation[d] > REACH_AT_MOST / (conv->kernel[d] - 1))) {
      return false;
    }
    taps *= conv->kernel[d];
    phases *= conv->stride[d];
    /* What the smallest tile reads. Tiles are larger only where that fits a cache. */
    const int64_t reach = (conv->kernel[d] - 1) * conv->dilation[d] + 2;
    bytes *= d == HC_DEPTHWISE_SPATIAL - 1
                 ? hc_max(HC_TILE_ROW_BYTES, (reach + HC_TILE_COLUMNS * conv->stride[d]) * ALIGNMENT)
                 : reach;
    if (taps > TAPS_AT_MOST || phases > PHASES_AT_MOST || bytes > HC_TILE_BYTES_AT_MOST / 2) {
      return false;
    }
  }
  return true;
}

/* ---- running tiles ---- */

typedef struct hc_run {
  const hc_tiling *tiling;
  const hc_depthwise_source *source, *grad;
  const hc_depthwise_weight *weight;
  const hc_depthwise_target *output;
  const void *bias;
  int64_t bias_stride;
  int64_t ntiles, nsplits;
  /* The taps in the order of their phases: phase i has [phases[i], phases[i + 1]). order: which tap of the kernel. */
  int64_t *phases, *order, *offsets;
  bool in_order;
  double *partials; /* nsplits x blocks of channels x taps x lanes, or, lanes along columns, x 1 */
  atomic_bool out_of_memory;
} hc_run;

static hc_code run_init(hc_run *run, const hc_tiling *tiling, hc_status *status) {
  const hc_tile_dim *dims = tiling->dims;
  const int64_t nphases[3] = {dims[0].out_step, dims[1].out_step, dims[2].out_step};
  const int64_t ntaps = product(tiling->conv->kernel), nall = product(nphases);
  run->tiling = tiling;
  run->ntiles = hc_tiling_ntiles(tiling);
  run->phases = malloc((size_t)(nall + 1 + 2 * ntaps) * sizeof *run->phases);
  if (run->phases == NULL) {
    return hc_fail(status, HC_ERROR_MEMORY, "out of memory for the taps of a depthwise convolution");
  }
  run->order = run->phases + nall + 1;
  run->offsets = run->order + ntaps;
  run->in_order = true;
  int64_t count = 0;
  for (int64_t phase = 0; phase < nall; ++phase) {
    const int64_t of[3] = {phase / nphases[2] / nphases[1], phase / nphases[2] % nphases[1],
                           phase % nphases[2]};
    run->phases[phase] = count;
    for (int64_t k = 0; k < ntaps; ++k) {
      const int64_t kernel[3] = {k / dims[2].kernel / dims[1].kernel, k / dims[2].kernel % dims[1].kernel,
                                 k % dims[2].kernel};
      int64_t at[3];
      if (hc_tile_tap(&dims[0], of[0], kernel[0], &at[0]) &&
          hc_tile_tap(&dims[1], of[1], kernel[1], &at[1]) &&
          hc_tile_tap(&dims[2], of[2], kernel[2], &at[2])) {
        run->in_order = run->in_order && k == count;
        run->order[count] = k;
        run->offsets[count++] =
            hc_tile_offset(tiling, at[0] - dims[0].least, at[1] - dims[1].least, at[2] - dims[2].least);
      }
    }
  }
  run->phases[nall] = count; /* each tap is in one phase */
  return HC_OK;
}

static void run_free(hc_run *run) {
  free(run->phases);
  free(run->partials);
}

/* Runs `body` over [0, count), on several threads where it is worth it. */
static hc_code run_parallel(hc_run *run, int64_t count, void (*body)(int64_t, int64_t, void *),
                            hc_status *status) {
  const hc_tiling *tiling = run->tiling;
  int64_t work = hc_max(1, tiling->conv->batch) * tiling->conv->channels * product(tiling->conv->kernel);
  for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL && work < PARALLEL_FROM; ++d) {
    work *= tiling->dims[d].end - tiling->dims[d].begin;
  }
  if (count == 1 || work < PARALLEL_FROM) {
    body(0, count, run);
  } else {
    HC_TRY_TORCH(status, torch_parallel_for(0, count, 1, body, run));
  }
  if (run->out_of_memory) {
    return hc_fail(status, HC_ERROR_MEMORY, "out of memory for a tile of a depthwise convolution");
  }
done:
  return status->code;
}

/* Several arrays in one aligned block. */
static void *reserve(size_t *total, size_t bytes, char *block) {
  void *at = block == NULL ? NULL : block + *total;
  *total += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return at;
}

/* The box of source columns that the tile's j read. */
static void box_of(const hc_tiling *tiling, const int64_t *j_begin, const int64_t *j_end, hc_tile_box *box) {
  for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL; ++d) {
    const hc_tile_dim *dim = &tiling->dims[d];
    box->lo[d] = j_begin[d] * dim->in_step + dim->least;
    box->hi[d] = (j_end[d] - 1) * dim->in_step + dim->most + 1;
  }
  box->nlines = tiling->nlines;
  box->line = tiling->line;
  box->row = tiling->row;
  box->slice = tiling->slice;
}

static int64_t channels_of(const hc_tiling *tiling, int64_t block) {
  return tiling->along_channels
             ? hc_min(tiling->simd->lanes, tiling->conv->channels - block * tiling->simd->lanes)
             : 1;
}

/* ---- forward, input gradient ---- */

typedef struct hc_scratch {
  char *tile, *weights, *natural, *first, *out;
} hc_scratch;

static size_t lay_out(const hc_tiling *tiling, char *block, hc_scratch *scratch) {
  const size_t vector = (size_t)tiling->simd->lanes * tiling->simd->packed_size;
  const size_t taps = (size_t)product(tiling->conv->kernel) * vector;
  size_t total = 0;
  scratch->tile = reserve(&total, (size_t)tiling->numbers * tiling->simd->packed_size, block);
  scratch->weights = reserve(&total, taps, block);
  scratch->natural = reserve(&total, taps, block);
  scratch->first = reserve(&total, vector, block);
  scratch->out = reserve(&total, ((size_t)tiling->dims[2].tile + 1) * vector, block);
  return total;
}

/* The weights of a block of channels, in the order of the phases: a vector a tap. */
static void pack_weights(const hc_run *run, int64_t block, const hc_scratch *scratch) {
  const hc_tiling *tiling = run->tiling;
  const hc_simd *simd = tiling->simd;
  const int64_t *kernel = tiling->conv->kernel, *strides = run->weight->strides;
  const int64_t vector = simd->lanes * (int64_t)simd->packed_size;
  const int64_t channel_step = tiling->along_channels ? strides[0] : 0;
  const int64_t channels = tiling->along_channels ? channels_of(tiling, block) : simd->lanes;
  const char *from = (const char *)run->weight->base + block * (tiling->along_channels ? simd->lanes : 1) *
                                                           strides[0] * (int64_t)simd->stored_size;
  char *natural = run->in_order ? scratch->weights : scratch->natural;
  for (int64_t d = 0; d < kernel[0]; ++d) {
    for (int64_t h = 0; h < kernel[1]; ++h) {
      simd->pack_pixels(from + (d * strides[1] + h * strides[2]) * (int64_t)simd->stored_size, strides[3],
                        channel_step, channels, kernel[2],
                        natural + (d * kernel[1] + h) * kernel[2] * vector);
    }
  }
  for (int64_t t = 0; !run->in_order && t < product(kernel); ++t) {
    memcpy(scratch->weights + t * vector, natural + run->order[t] * vector, (size_t)vector);
  }
}

/* One row of outputs of one phase: j of width from j_begin to j_end, at `to` the first. */
static void correlate_row(const hc_run *run, const hc_scratch *scratch, int64_t phase, const char *source,
                          int64_t columns, int64_t channels, char *to) {
  const hc_tiling *tiling = run->tiling;
  const hc_simd *simd = tiling->simd;
  const int64_t size = (int64_t)simd->packed_size, lanes = simd->lanes;
  const int64_t begin = run->phases[phase], ntaps = run->phases[phase + 1] - begin;
  const int64_t step = run->output->strides[4] * tiling->dims[2].out_step;
  const int64_t in_step = tiling->along_channels ? tiling->dims[2].in_step * lanes : lanes;
  const char *weights = scratch->weights + begin * lanes * size;
  const int64_t *offsets = run->offsets + begin;
  const bool as_is = simd->stored_size == simd->packed_size;
  if (tiling->along_channels) {
    if (as_is && run->output->strides[1] == 1 && channels == lanes) {
      simd->correlate(source, offsets, weights, ntaps, in_step, columns, scratch->first, to, step);
    } else {
      simd->correlate(source, offsets, weights, ntaps, in_step, columns, scratch->first, scratch->out, lanes);
      simd->unpack_pixels(scratch->out, columns, to, step, run->output->strides[1], channels);
    }
    return;
  }
  const int64_t whole = as_is && step == 1 ? columns / lanes : 0;
  if (whole > 0) {
    simd->correlate(source, offsets, weights, ntaps, in_step, whole, scratch->first, to, lanes);
  }
  if (columns > whole * lanes) {
    simd->correlate(source + whole * lanes * size, offsets, weights, ntaps, in_step,
                    hc_ceil_div(columns, lanes) - whole, scratch->first, scratch->out, lanes);
    simd->unpack_line(scratch->out, columns - whole * lanes,
                      to + whole * lanes * step * (int64_t)simd->stored_size, step);
  }
}

/* Whether rows of outputs that are neighbours read, with taps that are, the same row. */
static bool rows_shared(const hc_tiling *tiling) {
  const hc_tile_dim *dims = tiling->dims;
  return !tiling->along_channels && dims[0].kernel == 1 && dims[1].kernel > 1 && dims[1].stride == 1 &&
         dims[1].dilation == 1;
}

/* `nrows` rows of outputs of one phase, where rows are shared: as correlate_row of each. */
static void correlate_rows(const hc_run *run, const hc_scratch *scratch, int64_t phase, const char *source,
                           int64_t nrows, int64_t columns, char *to) {
  const hc_tiling *tiling = run->tiling;
  const hc_simd *simd = tiling->simd;
  const int64_t size = (int64_t)simd->packed_size, stored = (int64_t)simd->stored_size, lanes = simd->lanes;
  const int64_t begin = run->phases[phase], height = tiling->dims[1].kernel;
  const int64_t ntaps = (run->phases[phase + 1] - begin) / height;
  const int64_t step = run->output->strides[4] * tiling->dims[2].out_step, next = run->output->strides[3];
  const char *weights = scratch->weights + begin * lanes * size;
  const int64_t *offsets = run->offsets + begin;
  /* The input gradient's taps go up as those of the forward pass go down, so its rows are taken from the last on. */
  const int64_t sign = tiling->dims[1].gradient ? -1 : 1, row = tiling->row;
  if (size == stored && step == 1 && columns >= lanes) {
    const int64_t first = sign < 0 ? nrows - 1 : 0;
    simd->correlate_rows(source + first * row * size, sign * row, offsets, weights, height, ntaps, nrows,
                         columns, scratch->first, to + first * next * stored, sign * next);
    return;
  }
  const int64_t line = hc_ceil_div(columns, lanes) * lanes;
  for (int64_t h = 0; h < nrows;) {
    const int64_t count =
        hc_min(nrows - h, tiling->dims[2].tile * lanes / line); /* that scratch->out holds */
    const int64_t first = sign < 0 ? count - 1 : 0;
    simd->correlate_rows(source + (h + first) * row * size, sign * row, offsets, weights, height, ntaps,
                         count, line, scratch->first, scratch->out + first * line * size, sign * line);
    for (int64_t r = 0; r < count; ++r, ++h) {
      simd->unpack_line(scratch->out + r * line * size, columns, to + h * next * stored, step);
    }
  }
}

static void correlate_tile(const hc_run *run, const hc_scratch *scratch, const int64_t *j_begin,
                           const int64_t *j_end, int64_t image, int64_t channel, int64_t channels) {
  const hc_tiling *tiling = run->tiling;
  const hc_tile_dim *dims = tiling->dims;
  const int64_t *strides = run->output->strides;
  const int64_t size = (int64_t)tiling->simd->packed_size, stored = (int64_t)tiling->simd->stored_size;
  char *base = (char *)run->output->base + (image * strides[0] + channel * strides[1]) * stored;
  const bool shared = rows_shared(tiling);
  int64_t phase = 0, p[3];
  for (p[0] = 0; p[0] < dims[0].out_step; ++p[0]) {
    for (p[1] = 0; p[1] < dims[1].out_step; ++p[1]) {
      for (p[2] = 0; p[2] < dims[2].out_step; ++p[2], ++phase) {
        int64_t from[3], to[3];
        for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL; ++d) {
          from[d] = j_begin[d];
          to[d] = j_end[d];
          hc_tile_clip(&dims[d], p[d], &from[d], &to[d]);
        }
        if (from[2] >= to[2]) {
          continue;
        }
        const int64_t column =
            (from[2] - j_begin[2]) * (tiling->along_channels ? dims[2].in_step * tiling->unit : 1);
        for (int64_t d = from[0]; d < to[0]; ++d) {
          for (int64_t h = from[1], rows = shared ? to[1] - h : 1; h < to[1]; h += rows) {
            const int64_t at = (d - j_begin[0]) * dims[0].in_step * tiling->slice +
                               (h - j_begin[1]) * dims[1].in_step * tiling->row + column;
            const int64_t out = (d * dims[0].out_step + p[0]) * strides[2] +
                                (h * dims[1].out_step + p[1]) * strides[3] +
                                (from[2] * dims[2].out_step + p[2]) * strides[4];
            if (shared) {
              correlate_rows(run, scratch, phase, scratch->tile + at * size, rows, to[2] - from[2],
                             base + out * stored);
            } else {
              correlate_row(run, scratch, phase, scratch->tile + at * size, to[2] - from[2], channels,
                            base + out * stored);
            }
          }
        }
      }
    }
  }
}

static void correlate_items(int64_t begin, int64_t end, void *context) {
  hc_run *run = context;
  const hc_tiling *tiling = run->tiling;
  const hc_simd *simd = tiling->simd;
  hc_scratch scratch;
  char *block = aligned_alloc(ALIGNMENT, lay_out(tiling, NULL, &scratch));
  if (block == NULL) {
    run->out_of_memory = true;
    return;
  }
  (void)lay_out(tiling, block, &scratch);
  memset(scratch.first, 0, (size_t)simd->lanes * simd->packed_size);
  int64_t ready = -1; /* the block of channels whose weights are */
  for (int64_t item = begin; item < end; ++item) {
    const int64_t of_channels = item % tiling->nblocks, tile = item / tiling->nblocks % run->ntiles;
    const int64_t image = item / tiling->nblocks / run->ntiles;
    const int64_t channel = of_channels * tiling->unit, channels = channels_of(tiling, of_channels);
    int64_t j_begin[3], j_end[3];
    hc_tile_box box;
    if (of_channels != ready) {
      ready = of_channels;
      pack_weights(run, of_channels, &scratch);
      if (run->bias != NULL) {
        const char *bias = (const char *)run->bias + channel * run->bias_stride * (int64_t)simd->stored_size;
        simd->pack_pixels(bias, 0, tiling->along_channels ? run->bias_stride : 0,
                          tiling->along_channels ? channels : simd->lanes, 1, scratch.first);
      }
    }
    hc_tiling_tile(tiling, tile, j_begin, j_end);
    box_of(tiling, j_begin, j_end, &box);
    hc_tile_pack(tiling, &box, run->source, image, channel, channels, scratch.tile);
    correlate_tile(run, &scratch, j_begin, j_end, image, channel, channels);
  }
  free(block);
}

static bool is_empty(const hc_depthwise *conv, const int64_t *begin, const int64_t *end) {
  bool empty = conv->batch == 0 || conv->channels == 0;
  for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL; ++d) {
    empty = empty || begin[d] >= end[d];
  }
  return empty;
}

static hc_code refuse(hc_status *status) {
  return hc_fail(status, HC_ERROR_ARGUMENT,
                 "the window of a depthwise convolution spans too much, expected one that hc_depthwise_fits");
}

static hc_code correlate(const hc_depthwise *conv, bool gradient, const hc_depthwise_source *source,
                         const hc_depthwise_weight *weight, const void *bias, int64_t bias_stride,
                         const hc_depthwise_target *output, hc_status *status) {
  hc_run run = {
      .source = source, .weight = weight, .output = output, .bias = bias, .bias_stride = bias_stride};
  hc_tiling tiling;
  if (is_empty(conv, output->begin, output->end)) {
    return HC_OK;
  }
  if (!hc_tiling_init(conv, gradient, output->begin, output->end, output->strides, &tiling)) {
    return refuse(status);
  }
  HC_TRY(run_init(&run, &tiling, status));
  HC_TRY(run_parallel(&run, conv->batch * run.ntiles * tiling.nblocks, correlate_items, status));
done:
  run_free(&run);
  return status->code;
}

hc_code hc_depthwise_forward(const hc_depthwise *conv, const hc_depthwise_source *input,
                             const hc_depthwise_weight *weight, const void *bias, int64_t bias_stride,
                             const hc_depthwise_target *output, hc_status *status) {
  return correlate(conv, false, input, weight, bias, bias_stride, output, status);
}

hc_code hc_depthwise_input_gradient(const hc_depthwise *conv, const hc_depthwise_source *grad_output,
                                    const hc_depthwise_weight *weight, const hc_depthwise_target *grad_input,
                                    hc_status *status) {
  return correlate(conv, true, grad_output, weight, NULL, 0, grad_input, status);
}

/* ---- weight gradient ---- */

typedef struct hc_reduce_scratch {
  char *tile, *grad, *sums;
} hc_reduce_scratch;

/* The output gradient of a tile, one line a row, its end filled with zeros up to whole vectors. */
static void grad_box(const hc_tiling *tiling, const int64_t *j_begin, const int64_t *j_end,
                     hc_tile_box *box) {
  const hc_tile_dim *dims = tiling->dims;
  memcpy(box->lo, j_begin, sizeof box->lo);
  memcpy(box->hi, j_end, sizeof box->hi);
  box->nlines = 1;
  box->line = tiling->along_channels ? dims[2].tile
                                     : hc_ceil_div(dims[2].tile, tiling->simd->lanes) * tiling->simd->lanes;
  box->row = box->line * tiling->unit;
  box->slice = box->row * dims[1].tile;
}

static size_t lay_out_reduce(const hc_tiling *tiling, char *block, hc_reduce_scratch *scratch) {
  const size_t size = tiling->simd->packed_size;
  const int64_t none[3] = {0, 0, 0};
  const size_t sums = (size_t)(product(tiling->conv->kernel) * tiling->simd->lanes);
  hc_tile_box box;
  size_t total = 0;
  grad_box(tiling, none, none, &box);
  scratch->tile = reserve(&total, (size_t)tiling->numbers * size, block);
  scratch->grad = reserve(&total, (size_t)(box.slice * tiling->dims[0].tile) * size, block);
  scratch->sums = reserve(&total, sums * size, block);
  return total;
}

/* The same where the taps of a row are adjacent, and their rows read shared rows. */
static void reduce_rows(const hc_run *run, const hc_reduce_scratch *scratch, const hc_tile_box *grad,
                        const char *of, int64_t count) {
  const hc_tiling *tiling = run->tiling;
  const hc_simd *simd = tiling->simd;
  const int64_t *kernel = tiling->conv->kernel;
  const int64_t size = (int64_t)simd->packed_size, in_slice = kernel[1] * kernel[2];
  const int64_t rows = grad->hi[1] - grad->lo[1];
  const int64_t in_one = hc_max(ROWS_AT_ONCE, ROWS_BYTES / ((tiling->row + count * simd->lanes) * size));
  for (int64_t d = 0; d < grad->hi[0] - grad->lo[0]; ++d) {
    for (int64_t h = 0; h < rows; h += in_one) {
      for (int64_t k = 0; k < kernel[0]; ++k) {
        const int64_t at =
            d * tiling->dims[0].in_step * tiling->slice + h * tiling->row + run->offsets[k * in_slice];
        simd->reduce_rows(scratch->tile + at * size, tiling->row, kernel[1], kernel[2],
                          tiling->dims[1].dilation, of + (d * grad->slice + h * grad->row) * size, grad->row,
                          hc_min(in_one, rows - h), count, scratch->sums + k * in_slice * simd->lanes * size);
      }
    }
  }
}

/* Adds a packed tile to the sums. of: its output gradient. */
static void reduce_tile(const hc_run *run, const hc_reduce_scratch *scratch, const hc_tile_box *grad,
                        const char *of) {
  enum { VECTORS = 64, ADJACENT = 3 }; /* about as many are multiplied before the sums are put back; taps */
  const hc_tiling *tiling = run->tiling;
  const hc_simd *simd = tiling->simd;
  const hc_tile_dim *dims = tiling->dims;
  const int64_t size = (int64_t)simd->packed_size, lanes = simd->lanes, ntaps = product(tiling->conv->kernel);
  const int64_t step = tiling->along_channels ? dims[2].in_step * lanes : lanes;
  const int64_t columns = grad->hi[2] - grad->lo[2];
  const int64_t count = tiling->along_channels ? columns : hc_ceil_div(columns, lanes);
  const int64_t slices = grad->hi[0] - grad->lo[0], rows = grad->hi[1] - grad->lo[1];
  const int64_t in_one = hc_max(1, VECTORS / count);
  if (!tiling->along_channels && dims[1].stride == 1 && dims[2].stride == 1 && dims[2].dilation == 1 &&
      dims[2].kernel >= ADJACENT) {
    reduce_rows(run, scratch, grad, of, count);
    return;
  }
  for (int64_t d = 0; d < slices; ++d) {
    for (int64_t h = 0; h < rows; h += in_one) {
      simd->reduce(scratch->tile +
                       (d * dims[0].in_step * tiling->slice + h * dims[1].in_step * tiling->row) * size,
                   run->offsets, ntaps, step, dims[1].in_step * tiling->row,
                   of + (d * grad->slice + h * grad->row) * size, grad->row, hc_min(in_one, rows - h), count,
                   scratch->sums);
    }
  }
}

static void reduce_items(int64_t begin, int64_t end, void *context) {
  hc_run *run = context;
  const hc_tiling *tiling = run->tiling;
  const hc_simd *simd = tiling->simd;
  const int64_t ntaps = product(tiling->conv->kernel), nsums = ntaps * simd->lanes;
  const int64_t nparts = tiling->conv->batch * run->ntiles;
  hc_reduce_scratch scratch;
  char *block = aligned_alloc(ALIGNMENT, lay_out_reduce(tiling, NULL, &scratch));
  if (block == NULL) {
    run->out_of_memory = true;
    return;
  }
  (void)lay_out_reduce(tiling, block, &scratch);
  memset(scratch.sums, 0, (size_t)nsums * simd->packed_size);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t of_channels = item % tiling->nblocks, split = item / tiling->nblocks;
    const int64_t channel = of_channels * tiling->unit, channels = channels_of(tiling, of_channels);
    double *partial = run->partials + (split * tiling->nblocks + of_channels) * ntaps * tiling->unit;
    /* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): whoever runs this has allocated them */
    memset(partial, 0, (size_t)(ntaps * tiling->unit) * sizeof *partial);
    for (int64_t part = split * nparts / run->nsplits; part < (split + 1) * nparts / run->nsplits; ++part) {
      const int64_t image = part / run->ntiles;
      int64_t j_begin[3], j_end[3];
      hc_tile_box box, grad;
      hc_tiling_tile(tiling, part % run->ntiles, j_begin, j_end);
      box_of(tiling, j_begin, j_end, &box);
      grad_box(tiling, j_begin, j_end, &grad);
      hc_tile_pack(tiling, &box, run->source, image, channel, channels, scratch.tile);
      const char *of = hc_tile_in_place(tiling, run->grad, image, channel, &grad);
      if (of == NULL) {
        hc_tile_pack(tiling, &grad, run->grad, image, channel, channels, scratch.grad);
        of = scratch.grad;
      }
      reduce_tile(run, &scratch, &grad, of);
      if (tiling->along_channels) {
        simd->flush(scratch.sums, partial, nsums);
      } else {
        simd->flush_lanes(scratch.sums, partial, ntaps);
      }
    }
  }
  free(block);
}

/* Sums the partials of all splits, in their order, into the gradient. */
static void store_weight_gradient(const hc_run *run, bool add) {
  const hc_tiling *tiling = run->tiling;
  const hc_simd *simd = tiling->simd;
  const int64_t *kernel = tiling->conv->kernel, *strides = run->weight->strides;
  const int64_t unit = tiling->unit, ntaps = product(kernel);
  const int64_t of_split = tiling->nblocks * ntaps * unit;
  for (int64_t channel = 0; channel < tiling->conv->channels; ++channel) {
    const double *partial = run->partials + channel / unit * ntaps * unit + channel % unit;
    for (int64_t d = 0; d < kernel[0]; ++d) {
      for (int64_t h = 0; h < kernel[1]; ++h) {
        for (int64_t w = 0; w < kernel[2]; ++w, partial += unit) {
          double sum = 0;
          for (int64_t split = 0; split < run->nsplits; ++split) {
            sum += partial[split * of_split];
          }
          const int64_t at = channel * strides[0] + d * strides[1] + h * strides[2] + w * strides[3];
          simd->store(sum, add, (char *)run->weight->base + at * (int64_t)simd->stored_size);
        }
      }
    }
  }
}

hc_code hc_depthwise_weight_gradient(const hc_depthwise *conv, const hc_depthwise_source *input,
                                     const hc_depthwise_source *grad_output, const int64_t *begin,
                                     const int64_t *end, bool add, const hc_depthwise_weight *grad_weight,
                                     hc_status *status) {
  hc_run run = {.source = input, .grad = grad_output, .weight = grad_weight};
  hc_tiling tiling;
  const int64_t nothing[3] = {0, 0, 0}, one[3] = {1, 1, 1};
  const bool empty = is_empty(conv, begin, end);
  if (conv->channels == 0 || (empty && add)) {
    return HC_OK;
  }
  const int64_t piece = input->base[1] != NULL ? 1 : 0; /* whose layout decides what the lanes are */
  if (!hc_tiling_init(conv, false, empty ? nothing : begin, empty ? one : end, input->strides[piece],
                      &tiling)) {
    return refuse(status);
  }
  HC_TRY(run_init(&run, &tiling, status));
  const int64_t nparts = conv->batch * run.ntiles;
  run.nsplits = empty ? 0 : hc_min(nparts, hc_ceil_div(PARTIALS_WANTED, tiling.nblocks));
  const size_t count = (size_t)(run.nsplits * tiling.nblocks * product(conv->kernel) * tiling.unit);
  if (!empty) {
    run.partials = malloc(count * sizeof *run.partials);
    if (run.partials == NULL) {
      HC_TRY(hc_fail(status, HC_ERROR_MEMORY, "out of memory for a depthwise convolution's weight gradient"));
    }
    HC_TRY(run_parallel(&run, run.nsplits * tiling.nblocks, reduce_items, status));
  }
  store_weight_gradient(&run, add);
done:
  run_free(&run);
  return status->code;
}
