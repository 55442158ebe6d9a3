/* moves: see moves.h. */
#include "moves.h"

#include <string.h>

#include "device.h"
#include "shard.h"

hc_part hc_part_of(AtenTensorHandle tensor, const hc_shape *shape) {
  return (hc_part){.tensor = tensor, .offset_bytes = 0, .shape = *shape};
}

static int64_t element_size(const hc_shape *shape) {
  return (int64_t)aoti_torch_dtype_element_size(shape->dtype);
}

hc_part hc_part_narrow(const hc_part *part, int64_t dim, int64_t begin, int64_t length) {
  hc_part narrow = *part;
  narrow.offset_bytes += begin * part->shape.strides[dim] * element_size(&part->shape);
  narrow.shape.sizes[dim] = length;
  return narrow;
}

static hc_element element_of(int32_t dtype) {
  return dtype == aoti_torch_dtype_float32()    ? HC_ELEMENT_FLOAT32
         : dtype == aoti_torch_dtype_float64()  ? HC_ELEMENT_FLOAT64
         : dtype == aoti_torch_dtype_bfloat16() ? HC_ELEMENT_BFLOAT16
         : dtype == aoti_torch_dtype_float16()  ? HC_ELEMENT_FLOAT16
                                                : HC_ELEMENT_OTHER;
}

/* ---- through ATen ---- */

/* A tensor that is the part. A byte buffer is read as the part's dtype. */
static hc_code view(const hc_part *part, AtenTensorHandle *out, hc_status *status) {
  const hc_shape *shape = &part->shape;
  int32_t dtype = 0;
  HC_TRY_TORCH(status, aoti_torch_get_dtype(part->tensor, &dtype));
  if (dtype != shape->dtype) {
    HC_TRY_TORCH(status, aoti_torch__alloc_from_pool(part->tensor, part->offset_bytes, shape->dtype,
                                                     shape->ndim, shape->sizes, shape->strides, out));
  } else {
    HC_TRY_TORCH(status,
                 aoti_torch__reinterpret_tensor(part->tensor, shape->ndim, shape->sizes, shape->strides,
                                                part->offset_bytes / element_size(shape), out));
  }
done:
  return status->code;
}

static hc_code move_by_aten(bool add, const hc_part *target, const hc_part *source, hc_status *status) {
  AtenTensorHandle to = NULL, from = NULL, sum = NULL;
  HC_TRY(view(target, &to, status));
  HC_TRY(view(source, &from, status));
  if (add) {
    /* The stable ABI has no in-place add that takes no Scalar; a - (-1) b is the one that exists. */
    HC_TRY_TORCH(status, aoti_torch_aten_subtract_Tensor(to, from, -1.0, &sum));
  }
  HC_TRY_TORCH(status, aoti_torch_copy_(to, add ? sum : from, 1));
done:
  hc_tensor_free(&to);
  hc_tensor_free(&from);
  hc_tensor_free(&sum);
  return status->code;
}

static hc_code fill_by_aten(const hc_part *target, double number, hc_status *status) {
  AtenTensorHandle to = NULL;
  HC_TRY(view(target, &to, status));
  HC_TRY_TORCH(status, aoti_torch_aten_fill__Scalar(to, number));
done:
  hc_tensor_free(&to);
  return status->code;
}

/* ---- as blocks ---- */

/* Below this many bytes a block is copied by one thread: starting others costs more. */
enum { BYTES_PER_THREAD = 1 << 17 };

typedef struct rows {
  const hc_block *block;
  int64_t size; /* of an element */
  hc_element element;
  bool add;
} rows;

static void run_rows(int64_t begin, int64_t end, void *context) {
  const rows *r = context;
  const hc_block part = hc_block_rows(r->block, r->size, begin, end);
  if (r->add) {
    hc_block_add(&part, r->element);
  } else {
    hc_block_copy(&part, r->size);
  }
}

static hc_code run_block(const rows *r, hc_status *status) {
  const hc_block *block = r->block;
  const int64_t bytes = hc_block_numel(block) * r->size;
  const int64_t count = block->ndim > 0 ? block->sizes[0] : 1;
  if (bytes < 2 * (int64_t)BYTES_PER_THREAD || count == 1) {
    run_rows(0, count, (void *)(uintptr_t)r);
    return HC_OK;
  }
  const int64_t grain = hc_max(1, count * BYTES_PER_THREAD / bytes);
  HC_TRY_TORCH(status, torch_parallel_for(0, count, grain, run_rows, (void *)(uintptr_t)r));
done:
  return status->code;
}

static bool has_kernels(const hc_shape *shape) {
  return hc_device_takes(shape->device_type, shape->device_index);
}

/* Whether the part's memory can be had as it is. */
static bool has_blocks(const hc_moves *moves, const hc_shape *shape) {
  const int64_t size = element_size(shape);
  return (hc_shape_on_cpu(shape) || has_kernels(shape)) &&
         (size == 1 || size == 2 || size == 4 || size == 8 || size == 16) &&
         (!moves->add || element_of(shape->dtype) != HC_ELEMENT_OTHER);
}

void hc_moves_init(bool add, hc_moves *moves) {
  moves->add = add;
  moves->count = 0;
  moves->fills = false;
  moves->like = (hc_shape){.ndim = 0};
}

hc_code hc_moves_run(hc_moves *moves, hc_status *status) {
  const int64_t count = moves->count, size = element_size(&moves->like);
  const hc_element element = element_of(moves->like.dtype);
  const bool fills = moves->fills;
  moves->count = 0;
  moves->fills = false;
  if (count > 0 && has_kernels(&moves->like)) {
    const int32_t device = moves->like.device_index;
    return moves->add ? hc_device_blocks_add(device, moves->blocks, count, element, status)
           : fills    ? hc_device_blocks_fill(device, moves->blocks, count, size, moves->value, status)
                      : hc_device_blocks_copy(device, moves->blocks, count, size, status);
  }
  for (int64_t i = 0; i < count; ++i) {
    const rows r = {&moves->blocks[i], size, element, moves->add};
    HC_TRY(run_block(&r, status));
  }
done:
  return status->code;
}

hc_code hc_moves_push(hc_moves *moves, const hc_part *target, const hc_part *source, hc_status *status) {
  void *to = NULL, *from = NULL;
  if (hc_shape_numel(&target->shape) == 0) {
    return HC_OK;
  }
  if (!has_blocks(moves, &target->shape)) {
    return move_by_aten(moves->add, target, source, status);
  }
  if (moves->count == HC_MOVES) {
    HC_TRY(hc_moves_run(moves, status));
  }
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(target->tensor, &to));
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(source->tensor, &from));
  if (!hc_block_make((char *)to + target->offset_bytes, (const char *)from + source->offset_bytes,
                     target->shape.ndim, target->shape.sizes, target->shape.strides, source->shape.strides,
                     &moves->blocks[moves->count])) {
    return move_by_aten(moves->add, target, source, status);
  }
  moves->like = target->shape;
  ++moves->count;
done:
  return status->code;
}

hc_code hc_moves_fill(hc_moves *moves, const hc_part *target, double number, hc_status *status) {
  void *to = NULL;
  unsigned char value[sizeof moves->value] = {0}; /* 0 is zeros in every dtype */
  const hc_shape *shape = &target->shape;
  if (hc_shape_numel(shape) == 0) {
    return HC_OK;
  }
  if (!has_kernels(shape) || !has_blocks(moves, shape) ||
      (!hc_element_from(number, element_of(shape->dtype), value) && number != 0)) {
    return fill_by_aten(target, number, status);
  }
  if (moves->count == HC_MOVES || (moves->fills && memcmp(value, moves->value, sizeof value) != 0)) {
    HC_TRY(hc_moves_run(moves, status));
  }
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(target->tensor, &to));
  if (!hc_block_make((char *)to + target->offset_bytes, NULL, shape->ndim, shape->sizes, shape->strides,
                     shape->strides, &moves->blocks[moves->count])) {
    return fill_by_aten(target, number, status);
  }
  memcpy(moves->value, value, sizeof value);
  moves->fills = true;
  moves->like = *shape;
  ++moves->count;
done:
  return status->code;
}

hc_code hc_move(bool add, const hc_part *target, const hc_part *source, hc_status *status) {
  hc_moves moves;
  hc_moves_init(add, &moves);
  HC_TRY(hc_moves_push(&moves, target, source, status));
  HC_TRY(hc_moves_run(&moves, status));
done:
  return status->code;
}
