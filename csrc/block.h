/* block: boxes of memory, copied or added. With this one primitive halos are packed and unpacked, strips assembled, and
 * boundary columns overwritten or added to.
 *
 * A block says where a box of elements comes from and where it goes, each with strides of its own, so that no tensor
 * needs a view made for it and no layout is special. Blocks are normalised when made: sizes of 1 dropped, the dimensions
 * in the order of the target's strides, neighbours merged that are contiguous on both sides. What remains of a halo is
 * usually two dimensions, rows of one length.
 *
 * This header knows neither torch nor CUDA: it is what the host code and the kernels in cuda/ agree on.
 */
#ifndef HC_BLOCK_H
#define HC_BLOCK_H

#include <stdbool.h>
#include <stdint.h>

enum { HC_BLOCK_DIMS = 6 };

typedef struct hc_block {
  void *target;
  const void *source;
  int64_t ndim;                 /* of those that remain; 0: one element */
  int64_t sizes[HC_BLOCK_DIMS]; /* outermost first, none of them 0 */
  int64_t target_strides[HC_BLOCK_DIMS], source_strides[HC_BLOCK_DIMS]; /* in elements */
} hc_block;

/* What the elements are, as far as adding them has to know. 16-bit numbers are added in float. */
typedef enum hc_element {
  HC_ELEMENT_OTHER, /* copied only */
  HC_ELEMENT_FLOAT64,
  HC_ELEMENT_FLOAT32,
  HC_ELEMENT_FLOAT16,
  HC_ELEMENT_BFLOAT16,
} hc_element;

/* Normalises a box of `ndim` dimensions. False, where more than HC_BLOCK_DIMS remain; `sizes` has no 0. */
bool hc_block_make(void *target, const void *source, int64_t ndim, const int64_t *sizes,
                   const int64_t *target_strides, const int64_t *source_strides, hc_block *block);
int64_t hc_block_numel(const hc_block *block);

/* On the host. Target and source of a block do not overlap; nor do the targets of blocks that are copied at once.
 * element_size: 1, 2, 4, 8 or 16 bytes. */
void hc_block_copy(const hc_block *block, int64_t element_size);
/* target += source. Not for HC_ELEMENT_OTHER. */
void hc_block_add(const hc_block *block, hc_element element);
/* Writes the element nearest to a number to `bytes`, which has room for 8. False for HC_ELEMENT_OTHER. */
bool hc_element_from(double number, hc_element element, void *bytes);
/* The rows [begin, end) of the outermost dimension, as a block of its own. */
hc_block hc_block_rows(const hc_block *block, int64_t element_size, int64_t begin, int64_t end);

#endif
