/* moves: elements copied or added from parts of tensors to parts of others, and parts set to one number.
 *
 * A part is a box of a tensor's storage: where it begins, its sizes, its strides. No view is made for it. Moves are
 * gathered as blocks (block.h) and run together: on a device by one kernel for all of them (device.h), on the CPU one
 * after the other, spread over torch's threads where they are large. What has no block (a device without kernels of ours, a dtype that
 * only ATen can add) goes through ATen's copy_, at once; so does filling, except by a kernel.
 *
 * The moves of one list must not depend on each other.
 */
#ifndef HC_MOVES_H
#define HC_MOVES_H

#include "block.h"
#include "tensor.h"

typedef struct hc_part {
  AtenTensorHandle tensor; /* borrowed */
  int64_t offset_bytes;    /* from the tensor's own beginning */
  hc_shape shape;          /* of the part, with the strides in the tensor */
} hc_part;

/* All of a tensor of this shape. */
hc_part hc_part_of(AtenTensorHandle tensor, const hc_shape *shape);
/* [begin, begin + length) of `dim`. */
hc_part hc_part_narrow(const hc_part *part, int64_t dim, int64_t begin, int64_t length);

enum { HC_MOVES = 16 }; /* as many as one kernel takes */

typedef struct hc_moves {
  bool add;
  int64_t count;
  hc_shape like;           /* dtype and device of what is in `blocks` */
  bool fills;              /* some of `blocks` have no source: they are set to `value` */
  unsigned char value[16]; /* an element */
  hc_block blocks[HC_MOVES];
} hc_moves;

/* An empty list. */
void hc_moves_init(bool add, hc_moves *moves);
/* Parts of one size and dtype, on one device. May run the moves so far. */
hc_code hc_moves_push(hc_moves *moves, const hc_part *target, const hc_part *source, hc_status *status);
/* Sets a part to a number. Not where the moves add. */
hc_code hc_moves_fill(hc_moves *moves, const hc_part *target, double number, hc_status *status);
hc_code hc_moves_run(hc_moves *moves, hc_status *status);

/* One move, now. */
hc_code hc_move(bool add, const hc_part *target, const hc_part *source, hc_status *status);

#endif
