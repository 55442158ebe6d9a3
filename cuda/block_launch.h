/* block_launch: from blocks to launches. Plain arithmetic, the same for nvcc's library and for the tests' one.
 *
 * A launch is a grid of hc_launch_columns x spans thread blocks of HC_THREADS threads: a row of the grid works on one
 * span. The spans travel in the kernel's parameters, so that a launch reads no memory but what it moves.
 *
 * The arithmetic is on integers that stand for addresses, so that a test may ask for places where there is no memory.
 */
#ifndef HC_BLOCK_LAUNCH_H
#define HC_BLOCK_LAUNCH_H

#include <string.h>

#include "block_body.h"

enum {
  HC_THREADS = 256,
  HC_LAUNCH_SPANS = 16,
  HC_THREADS_PER_MULTIPROCESSOR =
      1024, /* as many as it holds at once, by the kernels' 64 registers: more would wait */
  /* cudaErrorInvalidValue and cudaErrorMisalignedAddress; block_launch.h knows no CUDA */
  HC_CUDA_INVALID_VALUE = 1,
  HC_CUDA_MISALIGNED = 716,
};
#define HC_SPAN_UNITS_MAX ((int64_t)1 << 30) /* of a span; what has more is cut */

typedef struct hc_launch {
  hc_unit fill; /* the element over and over */
  uint32_t count;
  hc_span spans[HC_LAUNCH_SPANS];
} hc_launch;

/* Kernel parameters may take 4 KiB on every device. */
typedef char hc_launch_fits_in_parameters[sizeof(hc_launch) <= 4096 ? 1 : -1];

/* A block in bytes, on its way to a span. */
typedef struct hc_box {
  uintptr_t target, source;
  int ndim;
  int64_t sizes[HC_SPAN_DIMS], target_strides[HC_SPAN_DIMS], source_strides[HC_SPAN_DIMS];
} hc_box;

/* Of what can be added; 0 for the rest. */
static inline int64_t hc_element_size(hc_element element) {
  switch (element) {
  case HC_ELEMENT_FLOAT64:
    return 8;
  case HC_ELEMENT_FLOAT32:
    return 4;
  case HC_ELEMENT_FLOAT16:
  case HC_ELEMENT_BFLOAT16:
    return 2;
  default:
    return 0;
  }
}

static inline hc_divider hc_divider_make(uint32_t divisor) {
  hc_divider result = {divisor, 0, 0};
  while (result.shift < 31 && ((uint32_t)1 << result.shift) < divisor) {
    ++result.shift;
  }
  result.magic = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << result.shift) - divisor)) / divisor + 1);
  return result;
}

/* The block with its elements as a dimension of bytes, merged with the innermost one where that is contiguous. */
static inline hc_box hc_box_of(const hc_block *block, int64_t element_size) {
  hc_box box;
  memset(&box, 0, sizeof box);
  box.target = (uintptr_t)block->target;
  box.source = (uintptr_t)block->source;
  const bool reads = block->source != NULL;
  for (int64_t dim = 0; dim < block->ndim; ++dim) {
    if (block->sizes[dim] > 1) {
      box.sizes[box.ndim] = block->sizes[dim];
      box.target_strides[box.ndim] = block->target_strides[dim] * element_size;
      box.source_strides[box.ndim] = reads ? block->source_strides[dim] * element_size : 0;
      ++box.ndim;
    }
  }
  const int last = box.ndim - 1;
  if (last >= 0 && box.target_strides[last] == element_size &&
      (box.source_strides[last] == element_size || !reads)) {
    box.sizes[last] *= element_size;
  } else {
    box.sizes[box.ndim++] = element_size;
  }
  box.target_strides[box.ndim - 1] = 1;
  box.source_strides[box.ndim - 1] = reads;
  return box;
}

/* Bytes of the widest unit that every row of the box consists of. */
static inline int64_t hc_box_width(const hc_box *box) {
  const int last = box->ndim - 1;
  uint64_t bits = 16 | (uint64_t)box->sizes[last] | box->target | box->source;
  for (int dim = 0; dim < last; ++dim) {
    bits |= (uint64_t)box->target_strides[dim] | (uint64_t)box->source_strides[dim];
  }
  return (int64_t)(bits & (~bits + 1));
}

/* Blocks on their way into launches. A box of more than HC_SPAN_UNITS_MAX units is cut along dimension `cut`, the first
 * whose rows are not too many, into pieces of `rows` rows or fewer, one after the other for each index of the
 * dimensions before. */
typedef struct hc_launches {
  const hc_block *blocks;
  int64_t count, next, element_size;
  hc_unit fill;
  hc_box box; /* the block before `next`, in units */
  int64_t width, rows, pieces, piece;
  int cut;
} hc_launches;

static inline int hc_block_check(const hc_block *block, int64_t element_size, bool fills, bool adds) {
  if (block->target == NULL || block->ndim < 0 || block->ndim > HC_BLOCK_DIMS ||
      (adds && block->source == NULL)) {
    return HC_CUDA_INVALID_VALUE;
  }
  for (int64_t dim = 0; dim < block->ndim; ++dim) {
    if (block->sizes[dim] < 1) {
      return HC_CUDA_INVALID_VALUE;
    }
  }
  if (adds || (fills && block->source == NULL)) { /* by elements, where a copy may go by bytes */
    const hc_box box = hc_box_of(block, element_size);
    return hc_box_width(&box) < element_size ? HC_CUDA_MISALIGNED : 0;
  }
  return 0;
}

/* 0, or an error: nothing may be launched then. `value`: what blocks without a source are set to; NULL: to zero. */
static inline int hc_launches_begin(const hc_block *blocks, int64_t count, int64_t element_size,
                                    const void *value, bool adds, hc_launches *launches) {
  memset(launches, 0, sizeof *launches);
  if (count < 0 || (count > 0 && blocks == NULL) || element_size < 1 || element_size > 16 ||
      (element_size & (element_size - 1)) != 0) {
    return HC_CUDA_INVALID_VALUE;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int error = hc_block_check(&blocks[i], element_size, value != NULL, adds);
    if (error != 0) {
      return error;
    }
  }
  launches->blocks = blocks;
  launches->count = count;
  launches->element_size = element_size;
  if (value != NULL) {
    unsigned char bytes[sizeof launches->fill];
    for (size_t i = 0; i < sizeof bytes; ++i) {
      bytes[i] = ((const unsigned char *)value)[i % (size_t)element_size];
    }
    memcpy(&launches->fill, bytes, sizeof bytes);
  }
  return 0;
}

static inline void hc_launches_take(hc_launches *launches) {
  hc_box box = hc_box_of(&launches->blocks[launches->next++], launches->element_size);
  const int last = box.ndim - 1;
  launches->width = hc_box_width(&box);
  box.sizes[last] /= launches->width;
  box.target_strides[last] *= launches->width;
  box.source_strides[last] *= launches->width;
  if (box.sizes[last] == 1 && last > 0) {
    --box.ndim;
  }
  int64_t row = 1; /* units of one row of dimension `cut` */
  int cut = box.ndim - 1;
  while (cut > 0 && row * box.sizes[cut] <= HC_SPAN_UNITS_MAX) {
    row *= box.sizes[cut--];
  }
  launches->cut = cut;
  launches->rows = HC_SPAN_UNITS_MAX / row < box.sizes[cut] ? HC_SPAN_UNITS_MAX / row : box.sizes[cut];
  launches->pieces = (box.sizes[cut] + launches->rows - 1) / launches->rows;
  for (int dim = 0; dim < cut; ++dim) {
    launches->pieces *= box.sizes[dim];
  }
  launches->piece = 0;
  launches->box = box;
}

static inline hc_span hc_launches_piece(hc_launches *launches) {
  const hc_box *box = &launches->box;
  const int cut = launches->cut;
  const int64_t along = (box->sizes[cut] + launches->rows - 1) / launches->rows;
  const int64_t row = launches->piece % along * launches->rows;
  const int64_t left = box->sizes[cut] - row;
  hc_span span;
  memset(&span, 0, sizeof span);
  span.ndim = (int16_t)(box->ndim - cut);
  span.width = (int16_t)launches->width;
  span.units = 1;
  for (int dim = cut; dim < box->ndim; ++dim) {
    const int64_t size = dim > cut ? box->sizes[dim] : left < launches->rows ? left : launches->rows;
    span.target_strides[dim - cut] = box->target_strides[dim];
    span.source_strides[dim - cut] = box->source_strides[dim];
    span.units *= (uint32_t)size;
    if (dim > cut) {
      span.sizes[dim - cut - 1] = hc_divider_make((uint32_t)size);
    }
  }
  uintptr_t target = box->target + (uintptr_t)(row * box->target_strides[cut]);
  uintptr_t source = box->source + (uintptr_t)(row * box->source_strides[cut]);
  int64_t number = launches->piece++ / along;
  for (int dim = cut - 1; dim >= 0; --dim) {
    const int64_t index = number % box->sizes[dim];
    number /= box->sizes[dim];
    target += (uintptr_t)(index * box->target_strides[dim]);
    source += (uintptr_t)(index * box->source_strides[dim]);
  }
  span.target = (char *)target;
  span.source = (const char *)source;
  return span;
}

/* The next launch; false where all is launched. */
static inline bool hc_launches_next(hc_launches *launches, hc_launch *launch) {
  launch->fill = launches->fill;
  launch->count = 0;
  while (launch->count < HC_LAUNCH_SPANS &&
         (launches->piece < launches->pieces || launches->next < launches->count)) {
    if (launches->piece == launches->pieces) {
      hc_launches_take(launches);
    }
    launch->spans[launch->count++] = hc_launches_piece(launches);
  }
  return launch->count > 0;
}

/* How many thread blocks a row of the grid has: a thread for each unit of the largest span, as far as the device holds
 * them at once; the threads walk on from there. */
static inline uint32_t hc_launch_columns(const hc_launch *launch, int multiprocessors) {
  const uint32_t most = (uint32_t)multiprocessors * (HC_THREADS_PER_MULTIPROCESSOR / HC_THREADS);
  uint32_t columns = 1;
  for (uint32_t i = 0; i < launch->count; ++i) {
    const uint32_t wanted = (launch->spans[i].units + HC_THREADS - 1) / HC_THREADS;
    columns = wanted > columns ? wanted : columns;
  }
  return columns < most ? columns : most;
}

#endif
