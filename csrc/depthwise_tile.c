/* depthwise_tile: see depthwise_tile.h. */
#include "depthwise_tile.h"

#include <string.h>

#include "shard.h"

/* Bytes: the rows that one row of outputs reads stay in the first-level cache, a tile in the second. */
enum { ROWS_BYTES = 32 << 10, TILE_BYTES = 192 << 10 };
enum { TILES_WANTED = 32, ROWS_AT_LEAST = 8, COLUMNS_AT_LEAST = 16 };

static int64_t round_up(int64_t a, int64_t b) { return hc_ceil_div(a, b) * b; }

static void init_dim(const hc_depthwise *conv, int64_t d, bool gradient, int64_t begin, int64_t end,
                     hc_tile_dim *dim) {
  const int64_t reach = (conv->kernel[d] - 1) * conv->dilation[d];
  *dim = (hc_tile_dim){.kernel = conv->kernel[d],
                       .padding = conv->padding[d],
                       .dilation = conv->dilation[d],
                       .stride = conv->stride[d],
                       .gradient = gradient,
                       .in_step = gradient ? 1 : conv->stride[d],
                       .out_step = gradient ? conv->stride[d] : 1,
                       .begin = begin,
                       .end = end};
  if (gradient) {
    dim->least = hc_floor_div(dim->padding - reach, dim->stride);
    dim->most = hc_floor_div(dim->stride - 1 + dim->padding, dim->stride);
  } else {
    dim->least = -dim->padding;
    dim->most = reach - dim->padding;
  }
  dim->first = hc_floor_div(begin, dim->out_step);
  dim->count = hc_floor_div(end - 1, dim->out_step) + 1 - dim->first;
}

/* Cuts a dimension into equal tiles of at most `most` j; of a multiple of `unit` where there are several. */
static void cut(hc_tile_dim *dim, int64_t most, int64_t unit) {
  dim->ntiles = hc_ceil_div(dim->count, hc_max(most, 1));
  dim->tile = hc_ceil_div(dim->count, dim->ntiles);
  if (dim->ntiles > 1) {
    dim->tile = round_up(dim->tile, unit);
    dim->ntiles = hc_ceil_div(dim->count, dim->tile);
  }
  dim->extent = (dim->tile - 1) * dim->in_step + dim->most - dim->least + 1;
}

/* How many j read at most `extent` columns. */
static int64_t j_within(const hc_tile_dim *dim, int64_t extent) {
  return hc_max(0, extent - (dim->most - dim->least + 1)) / dim->in_step + 1;
}

bool hc_tiling_init(const hc_depthwise *conv, bool gradient, const int64_t *begin, const int64_t *end,
                    const int64_t *strides, hc_tiling *tiling) {
  hc_tile_dim *dims = tiling->dims;
  tiling->conv = conv;
  for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL; ++d) {
    init_dim(conv, d, gradient, begin[d], end[d], &dims[d]);
  }
  /* The lanes go along what is dense in memory; along the other where that has too few numbers to fill them. */
  const int64_t columns = dims[2].count, channels = conv->channels;
  const int64_t lanes = hc_simd_choose(conv->dtype, INT64_MAX / 4)->lanes;
  tiling->along_channels = strides[1] == 1 && channels > 1 ? channels >= hc_min(lanes, columns) / 2
                                                           : columns < lanes / 2 && channels > columns;
  const hc_simd *simd = hc_simd_choose(conv->dtype, tiling->along_channels ? channels : columns);
  tiling->simd = simd;
  tiling->nblocks = tiling->along_channels ? hc_ceil_div(channels, simd->lanes) : channels;
  tiling->unit = tiling->along_channels ? simd->lanes : 1;
  const int64_t pixel = tiling->unit * (int64_t)simd->packed_size;

  cut(&dims[2],
      hc_max(j_within(&dims[2], ROWS_BYTES / pixel / (dims[0].kernel * dims[1].kernel)),
             tiling->along_channels ? COLUMNS_AT_LEAST : 4 * simd->lanes),
      tiling->along_channels ? COLUMNS_AT_LEAST : simd->lanes);
  if (tiling->along_channels) {
    tiling->nlines = 1;
    tiling->line = dims[2].extent;
  } else { /* a vector may begin at any tap of any j, and reads to its end */
    tiling->nlines = dims[2].in_step;
    tiling->line = round_up(dims[2].tile, simd->lanes) + simd->lanes +
                   (dims[2].most - dims[2].least) / dims[2].in_step + 1;
  }
  if (tiling->line > HC_TILE_BYTES_AT_MOST / pixel / tiling->nlines) {
    return false;
  }
  tiling->row = tiling->nlines * tiling->line * tiling->unit;

  const int64_t rows = TILE_BYTES / (tiling->row * (int64_t)simd->packed_size);
  const int64_t others = hc_max(1, conv->batch) * tiling->nblocks * dims[2].ntiles * dims[0].count;
  const int64_t parts = hc_ceil_div(TILES_WANTED, others);
  const int64_t slices = dims[0].most - dims[0].least + 1;
  cut(&dims[1], hc_min(j_within(&dims[1], rows / slices), hc_max(ROWS_AT_LEAST, dims[1].count / parts)), 1);
  cut(&dims[0],
      others * dims[1].ntiles / dims[0].count < TILES_WANTED ? 1 : j_within(&dims[0], rows / dims[1].extent),
      1);
  if (dims[1].extent > HC_TILE_BYTES_AT_MOST / (tiling->row * (int64_t)simd->packed_size) / dims[0].extent) {
    return false;
  }
  tiling->slice = dims[1].extent * tiling->row;
  tiling->numbers = dims[0].extent * tiling->slice;
  return true;
}

int64_t hc_tiling_ntiles(const hc_tiling *tiling) {
  return tiling->dims[0].ntiles * tiling->dims[1].ntiles * tiling->dims[2].ntiles;
}

void hc_tiling_tile(const hc_tiling *tiling, int64_t index, int64_t *j_begin, int64_t *j_end) {
  for (int64_t d = HC_DEPTHWISE_SPATIAL - 1; d >= 0; --d) {
    const hc_tile_dim *dim = &tiling->dims[d];
    j_begin[d] = dim->first + index % dim->ntiles * dim->tile;
    j_end[d] = hc_min(j_begin[d] + dim->tile, dim->first + dim->count);
    index /= dim->ntiles;
  }
}

bool hc_tile_tap(const hc_tile_dim *dim, int64_t phase, int64_t k, int64_t *offset) {
  if (!dim->gradient) {
    *offset = k * dim->dilation - dim->padding;
    return true;
  }
  const int64_t distance = phase + dim->padding - k * dim->dilation;
  *offset = hc_floor_div(distance, dim->stride);
  return *offset * dim->stride == distance;
}

void hc_tile_clip(const hc_tile_dim *dim, int64_t phase, int64_t *j_begin, int64_t *j_end) {
  *j_begin = hc_max(*j_begin, hc_ceil_div(dim->begin - phase, dim->out_step));
  *j_end = hc_min(*j_end, hc_ceil_div(dim->end - phase, dim->out_step));
}

int64_t hc_tile_offset(const hc_tiling *tiling, int64_t d, int64_t h, int64_t w) {
  const int64_t column = w % tiling->nlines * tiling->line + w / tiling->nlines;
  return d * tiling->slice + h * tiling->row + column * tiling->unit;
}

/* ---- packing ---- */

/* The place of `index` along the dimension of the pieces, or 0 in another one; -1 where nothing is. */
static int64_t piece_of(const hc_depthwise_source *source, int64_t d, int64_t index) {
  if (source->dim != d) {
    return index >= 0 && index < source->sizes[d] ? 0 : -1;
  }
  for (int64_t i = 0; i < HC_DEPTHWISE_PIECES; ++i) {
    if (index >= source->bounds[i] && index < source->bounds[i + 1]) {
      return source->base[i] == NULL ? -1 : i;
    }
  }
  return -1;
}

typedef struct line_of_piece {
  const char *from; /* its column 0, or where that would be */
  int64_t begin, end, step, row_step, channel_step;
} line_of_piece;

/* The parts of row (d, h) that are there, in order; returns how many. */
static int64_t parts_of_row(const hc_depthwise_source *source, size_t size, int64_t image, int64_t channel,
                            int64_t d, int64_t h, line_of_piece *parts) {
  const int64_t of_d = piece_of(source, 0, d), of_h = piece_of(source, 1, h);
  int64_t count = 0;
  if (of_d < 0 || of_h < 0) {
    return 0;
  }
  const int64_t first = source->dim == 2 ? 0 : of_d + of_h; /* one of which is 0 */
  const int64_t last = source->dim == 2 ? HC_DEPTHWISE_PIECES : first + 1;
  for (int64_t i = first; i < last; ++i) {
    const int64_t *strides = source->strides[i];
    if (source->base[i] == NULL) {
      continue;
    }
    const int64_t begins[3] = {source->dim == 0 ? source->bounds[i] : 0,
                               source->dim == 1 ? source->bounds[i] : 0,
                               source->dim == 2 ? source->bounds[i] : 0};
    const int64_t at = image * strides[0] + channel * strides[1] + (d - begins[0]) * strides[2] +
                       (h - begins[1]) * strides[3];
    parts[count++] = (line_of_piece){.from = (const char *)source->base[i] + at * (int64_t)size,
                                     .begin = begins[2],
                                     .end = source->dim == 2 ? source->bounds[i + 1] : source->sizes[2],
                                     .step = strides[4],
                                     .row_step = strides[3],
                                     .channel_step = strides[1]};
  }
  return count;
}

static void pack_line(const hc_tiling *tiling, const hc_tile_box *box, const line_of_piece *parts,
                      int64_t nparts, int64_t phase, int64_t channels, char *packed) {
  const hc_simd *simd = tiling->simd;
  const int64_t pixel = tiling->unit * (int64_t)simd->packed_size, step = box->nlines;
  const int64_t lo = box->lo[2] + phase;
  int64_t done = 0;
  for (int64_t i = 0; i < nparts; ++i) {
    const line_of_piece *part = &parts[i];
    const int64_t begin = hc_max(done, hc_ceil_div(part->begin - lo, step));
    const int64_t end = hc_min(box->line, hc_ceil_div(hc_min(part->end, box->hi[2]) - lo, step));
    if (begin >= end) {
      continue;
    }
    const char *from =
        part->from + (lo + begin * step - part->begin) * part->step * (int64_t)simd->stored_size;
    memset(packed + done * pixel, 0, (size_t)((begin - done) * pixel));
    if (tiling->along_channels) {
      simd->pack_pixels(from, part->step * step, part->channel_step, channels, end - begin,
                        packed + begin * pixel);
    } else {
      simd->pack_line(from, part->step * step, end - begin, packed + begin * pixel);
    }
    done = end;
  }
  memset(packed + done * pixel, 0, (size_t)((box->line - done) * pixel));
}

/* How many rows from h on, before `end`, lie in one piece, or all in none. */
static int64_t rows_alike(const hc_depthwise_source *source, int64_t h, int64_t end) {
  const int64_t bounds[2] = {0, source->sizes[1]};
  const int64_t *of = source->dim == 1 ? source->bounds : bounds;
  const int64_t count = source->dim == 1 ? HC_DEPTHWISE_PIECES + 1 : 2;
  for (int64_t i = 0; i < count; ++i) {
    if (of[i] > h) {
      return hc_min(of[i], end) - h;
    }
  }
  return end - h;
}

/* Rows of one part, or none, whose columns are adjacent. */
static void pack_lines(const hc_tiling *tiling, const hc_tile_box *box, const line_of_piece *part,
                       int64_t nrows, char *packed) {
  const hc_simd *simd = tiling->simd;
  const int64_t begin = hc_max(part->begin, box->lo[2]), end = hc_min(part->end, box->hi[2]);
  simd->pack_lines(part->from + (begin - part->begin) * (int64_t)simd->stored_size, part->row_step, nrows,
                   begin < end ? begin - box->lo[2] : 0, hc_max(end - begin, 0), box->line, packed, box->row);
}

void hc_tile_pack(const hc_tiling *tiling, const hc_tile_box *box, const hc_depthwise_source *source,
                  int64_t image, int64_t channel, int64_t channels, void *packed) {
  const int64_t size = (int64_t)tiling->simd->packed_size, stored = (int64_t)tiling->simd->stored_size;
  line_of_piece parts[HC_DEPTHWISE_PIECES];
  for (int64_t d = box->lo[0]; d < box->hi[0]; ++d) {
    int64_t alike = 1;
    for (int64_t h = box->lo[1]; h < box->hi[1]; h += alike) {
      const int64_t nparts = parts_of_row(source, tiling->simd->stored_size, image, channel, d, h, parts);
      char *row = (char *)packed + ((d - box->lo[0]) * box->slice + (h - box->lo[1]) * box->row) * size;
      alike = rows_alike(source, h, box->hi[1]);
      if (nparts == 0) {
        memset(row, 0, (size_t)(alike * box->row * size));
        continue;
      }
      if (nparts == 1 && parts[0].step == 1 && box->nlines == 1 && !tiling->along_channels) {
        pack_lines(tiling, box, &parts[0], alike, row);
        continue;
      }
      for (int64_t r = 0; r < alike; ++r, row += box->row * size) {
        for (int64_t phase = 0; phase < box->nlines; ++phase) {
          pack_line(tiling, box, parts, nparts, phase, channels,
                    row + phase * box->line * tiling->unit * size);
        }
        for (int64_t i = 0; i < nparts; ++i) {
          parts[i].from += parts[i].row_step * stored;
        }
      }
    }
  }
}

const void *hc_tile_in_place(const hc_tiling *tiling, const hc_depthwise_source *source, int64_t image,
                             int64_t channel, hc_tile_box *box) {
  const hc_simd *simd = tiling->simd;
  int64_t piece = 0, at[HC_DEPTHWISE_SPATIAL];
  if (tiling->along_channels || simd->stored_size != simd->packed_size || box->nlines != 1 ||
      (box->hi[2] - box->lo[2]) % simd->lanes != 0) {
    return NULL;
  }
  for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL; ++d) {
    const int64_t of = piece_of(source, d, box->lo[d]);
    if (of < 0 || of != piece_of(source, d, box->hi[d] - 1)) {
      return NULL;
    }
    piece += of;
    at[d] = box->lo[d] - (source->dim == d ? source->bounds[of] : 0);
  }
  const int64_t *strides = source->strides[piece];
  if (strides[4] != 1) {
    return NULL;
  }
  box->slice = strides[2];
  box->row = strides[3];
  return (const char *)source->base[piece] +
         (image * strides[0] + channel * strides[1] + at[0] * strides[2] + at[1] * strides[3] + at[2]) *
             (int64_t)simd->stored_size;
}
