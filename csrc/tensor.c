/* tensor: see tensor.h. */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include "tensor.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <string.h>

#include "depthwise_tensor.h"
#include "shard.h"
#include "stable.h"

/* ---- shapes ---- */

hc_code hc_tensor_shape(AtenTensorHandle tensor, hc_shape *shape, hc_status *status) {
  int64_t *sizes = NULL, *strides = NULL;
  HC_TRY_TORCH(status, aoti_torch_get_dim(tensor, &shape->ndim));
  if (shape->ndim > HC_MAX_DIM) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "a tensor has %" PRId64 " dimensions, expected at most %d",
                   shape->ndim, HC_MAX_DIM);
  }
  HC_TRY_TORCH(status, aoti_torch_get_sizes(tensor, &sizes));
  HC_TRY_TORCH(status, aoti_torch_get_strides(tensor, &strides));
  HC_TRY_TORCH(status, aoti_torch_get_dtype(tensor, &shape->dtype));
  HC_TRY_TORCH(status, aoti_torch_get_device_type(tensor, &shape->device_type));
  HC_TRY_TORCH(status, aoti_torch_get_device_index(tensor, &shape->device_index));
  memcpy(shape->sizes, sizes, (size_t)shape->ndim * sizeof *sizes);
  memcpy(shape->strides, strides, (size_t)shape->ndim * sizeof *strides);
done:
  return status->code;
}

int64_t hc_shape_numel(const hc_shape *shape) {
  int64_t numel = 1;
  for (int64_t dim = 0; dim < shape->ndim; ++dim) {
    numel *= shape->sizes[dim];
  }
  return numel;
}

/* Whether the strides are those that hc_shape_set_strides gives, but for dimensions of size 1. */
static bool is_dense(const hc_shape *shape, bool channels_last) {
  hc_shape dense = *shape;
  hc_shape_set_strides(&dense, channels_last);
  for (int64_t dim = 0; dim < shape->ndim; ++dim) {
    if (shape->sizes[dim] == 0) {
      return false;
    }
    if (shape->sizes[dim] > 1 && shape->strides[dim] != dense.strides[dim]) {
      return false;
    }
  }
  return true;
}

bool hc_shape_is_channels_last(const hc_shape *shape) {
  if ((shape->ndim != 4 && shape->ndim != 5) || shape->strides[1] == 0) {
    return false;
  }
  if (is_dense(shape, true) != is_dense(shape, false)) {
    return is_dense(shape, true);
  }
  /* Neither, or both: c10's rule. Strides grow in the order C, W, H(, D), N; a size of 1 makes no difference except
   * where it would leave NCHW and NHWC undistinguished. */
  int64_t least = 0;
  for (int64_t step = 0; step < shape->ndim; ++step) {
    const int64_t dim = step == 0 ? 1 : step == shape->ndim - 1 ? 0 : shape->ndim - step;
    if (shape->sizes[dim] == 0 || shape->strides[dim] < least) {
      return false;
    }
    if (dim == 0 && least == shape->strides[1]) {
      return false;
    }
    least = shape->strides[dim];
    if (shape->sizes[dim] > 1) {
      least *= shape->sizes[dim];
    }
  }
  return true;
}

void hc_shape_set_strides(hc_shape *shape, bool channels_last) {
  int64_t stride = 1;
  if (channels_last) {
    shape->strides[1] = stride;
    stride *= hc_max(shape->sizes[1], 1);
  }
  for (int64_t dim = shape->ndim - 1; dim >= 0; --dim) {
    if (channels_last && dim == 1) {
      continue;
    }
    shape->strides[dim] = stride;
    stride *= hc_max(shape->sizes[dim], 1);
  }
}

bool hc_shape_on_cpu(const hc_shape *shape) { return shape->device_type == aoti_torch_device_type_cpu(); }

/* ---- handles ---- */

void hc_tensor_free(AtenTensorHandle *tensor) {
  if (*tensor != NULL) {
    (void)aoti_torch_delete_tensor_object(*tensor); /* fails for NULL only */
    *tensor = NULL;
  }
}

hc_code hc_tensor_empty(const hc_shape *shape, AtenTensorHandle *out, hc_status *status) {
  HC_TRY_TORCH(status, aoti_torch_empty_strided(shape->ndim, shape->sizes, shape->strides, shape->dtype,
                                                shape->device_type, shape->device_index, out));
done:
  return status->code;
}

hc_code hc_tensor_zeros(const hc_shape *shape, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle zeros = NULL;
  HC_TRY(hc_tensor_empty(shape, &zeros, status));
  HC_TRY_TORCH(status, aoti_torch_zero_(zeros));
  *out = zeros;
  zeros = NULL;
done:
  hc_tensor_free(&zeros);
  return status->code;
}

hc_code hc_tensor_bytes(int64_t nbytes, const hc_shape *like, AtenTensorHandle *out, hc_status *status) {
  const int64_t stride = 1;
  HC_TRY_TORCH(status, aoti_torch_empty_strided(1, &nbytes, &stride, aoti_torch_dtype_uint8(),
                                                like->device_type, like->device_index, out));
done:
  return status->code;
}

hc_code hc_tensor_share(AtenTensorHandle tensor, AtenTensorHandle *out, hc_status *status) {
  HC_TRY_TORCH(status, aoti_torch_new_tensor_handle(tensor, out));
done:
  return status->code;
}

/* Replaces *tensor by a dense copy with the strides of `wanted`. */
static hc_code replace_by_copy(AtenTensorHandle *tensor, const hc_shape *wanted, hc_status *status) {
  AtenTensorHandle copy = NULL;
  HC_TRY(hc_tensor_empty(wanted, &copy, status));
  HC_TRY_TORCH(status, aoti_torch_copy_(copy, *tensor, 1));
  hc_tensor_free(tensor);
  *tensor = copy;
  copy = NULL;
done:
  hc_tensor_free(&copy);
  return status->code;
}

hc_code hc_tensor_make_format(AtenTensorHandle *tensor, bool channels_last, hc_status *status) {
  hc_shape shape;
  HC_TRY(hc_tensor_shape(*tensor, &shape, status));
  hc_shape wanted = shape;
  hc_shape_set_strides(&wanted, channels_last);
  if (memcmp(shape.strides, wanted.strides, (size_t)shape.ndim * sizeof *shape.strides) != 0) {
    HC_TRY(replace_by_copy(tensor, &wanted, status));
  }
done:
  return status->code;
}

hc_code hc_tensor_unalias(AtenTensorHandle *tensor, AtenTensorHandle other, hc_status *status) {
  void *data = NULL, *other_data = NULL;
  hc_shape shape;
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(*tensor, &data));
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(other, &other_data));
  if (data != NULL && data == other_data) {
    HC_TRY(hc_tensor_shape(*tensor, &shape, status));
    hc_shape_set_strides(&shape, hc_shape_is_channels_last(&shape));
    HC_TRY(replace_by_copy(tensor, &shape, status));
  }
done:
  return status->code;
}

hc_code hc_tensor_absent(AtenTensorHandle like, AtenTensorHandle *tensor, hc_status *status) {
  hc_shape shape;
  if (*tensor == NULL) {
    HC_TRY(hc_tensor_shape(like, &shape, status));
    shape.ndim = 1;
    shape.sizes[0] = 0;
    shape.strides[0] = 1;
    HC_TRY(hc_tensor_empty(&shape, tensor, status));
  }
done:
  return status->code;
}

/* Calls an ATen op of (Tensor, int[]) or (Tensor, int[], bool), which returns a tensor. keepdim < 0: without it. */
static hc_code call_with_ints(const char *op, AtenTensorHandle tensor, const int64_t *ints, int64_t count,
                              int keepdim, AtenTensorHandle *out, hc_status *status) {
  StableIValue stack[3] = {0, 0, keepdim > 0};
  HC_TRY(hc_stable_from_ints(ints, count, &stack[1], status));
  HC_TRY(hc_stable_from_tensor(tensor, &stack[0], status));
  HC_FAULT_POINT(status);
  const int32_t error = torch_call_dispatcher(op, "", stack, HC_TORCH_ABI_VERSION);
  stack[1] = 0; /* the dispatcher has taken both arguments over, also when it fails */
  if (error != 0) {
    stack[0] = 0;
  }
  HC_TRY(hc_check_torch(status, error, op));
  *out = hc_stable_to_tensor(stack[0]);
  stack[0] = 0;
done:
  hc_stable_free_list(&stack[1]);
  hc_stable_free_tensor(&stack[0]);
  return status->code;
}

hc_code hc_tensor_sum_to_channels(AtenTensorHandle tensor, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle sum = NULL;
  hc_shape shape;
  HC_TRY(hc_tensor_shape(tensor, &shape, status));
  int64_t sizes[HC_MAX_DIM];
  for (int64_t dim = 0; dim < shape.ndim; ++dim) {
    sizes[dim] = dim == 1 ? shape.sizes[1] : 1;
  }
  HC_TRY(call_with_ints("aten::sum_to_size", tensor, sizes, shape.ndim, -1, &sum, status));
  const int64_t channels = shape.sizes[1], stride = 1;
  HC_TRY_TORCH(status, aoti_torch__reinterpret_tensor(sum, 1, &channels, &stride, 0, out));
done:
  hc_tensor_free(&sum);
  return status->code;
}

/* ---- rows ---- */

hc_code hc_tensor_as_row(AtenTensorHandle tensor, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle dense = NULL;
  hc_shape shape;
  HC_TRY(hc_tensor_share(tensor, &dense, status));
  HC_TRY(hc_tensor_make_format(&dense, false, status));
  HC_TRY(hc_tensor_shape(dense, &shape, status));
  const int64_t sizes[2] = {1, hc_shape_numel(&shape)}, strides[2] = {hc_max(sizes[1], 1), 1};
  HC_TRY_TORCH(status, aoti_torch__reinterpret_tensor(dense, 2, sizes, strides, 0, out));
done:
  hc_tensor_free(&dense);
  return status->code;
}

hc_code hc_tensor_reduce_rows(AtenTensorHandle rows, const char *reduction, const hc_shape *shape,
                              AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle reduced = NULL;
  hc_shape row = *shape;
  const int64_t first_dim = 0, one_row[2] = {1, hc_shape_numel(shape)};
  if (strcmp(reduction, "sum") == 0) {
    HC_TRY(call_with_ints("aten::sum_to_size", rows, one_row, 2, -1, &reduced, status));
  } else if (strcmp(reduction, "max") == 0) {
    HC_TRY(call_with_ints("aten::amax", rows, &first_dim, 1, 1, &reduced, status));
  } else if (strcmp(reduction, "min") == 0) {
    HC_TRY(call_with_ints("aten::amin", rows, &first_dim, 1, 1, &reduced, status));
  } else {
    return hc_fail(status, HC_ERROR_ARGUMENT, "reduction is '%s', expected 'sum', 'max' or 'min'", reduction);
  }
  hc_shape_set_strides(&row, false);
  HC_TRY_TORCH(status, aoti_torch__reinterpret_tensor(reduced, row.ndim, row.sizes, row.strides, 0, out));
done:
  hc_tensor_free(&reduced);
  return status->code;
}

/* ---- local convolution ---- */

typedef int32_t (*forward_fn)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle *, const int64_t *,
                              int64_t, const int64_t *, int64_t, const int64_t *, int64_t, int32_t,
                              const int64_t *, int64_t, int64_t, AtenTensorHandle *);
typedef int32_t (*backward_fn)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, const int64_t **,
                               int64_t, const int64_t *, int64_t, const int64_t *, int64_t, const int64_t *,
                               int64_t, int32_t, const int64_t *, int64_t, int64_t, const int32_t *, int64_t,
                               AtenTensorHandle *, AtenTensorHandle *, AtenTensorHandle *);

/* Replaces the CPU function by its CUDA twin for a CUDA tensor. libtorch_cuda is not linked: the twin is taken from the
 * copy that torch has loaded. */
static hc_code choose(const char *cuda_name, AtenTensorHandle tensor, void **function, hc_status *status) {
  int32_t device_type = 0;
  void *library = NULL;
  HC_TRY_TORCH(status, aoti_torch_get_device_type(tensor, &device_type));
  if (device_type == aoti_torch_device_type_cpu()) {
    return HC_OK;
  }
  if (device_type != aoti_torch_device_type_cuda()) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "the device type is %" PRId32 ", expected cpu or cuda",
                   device_type);
  }
  library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == NULL) {
    return hc_fail(status, HC_ERROR_TORCH,
                   "libtorch_cuda.so is not loaded: a CUDA tensor needs a CUDA build of torch");
  }
  void *found = dlsym(library, cuda_name);
  (void)dlclose(library); /* torch keeps it loaded */
  if (found == NULL) {
    return hc_fail(status, HC_ERROR_TORCH, "libtorch_cuda.so has no %s", cuda_name);
  }
  *function = found;
done:
  return status->code;
}

hc_code hc_tensor_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                              const hc_conv_params *params, AtenTensorHandle *out, hc_status *status) {
  union {
    void *pointer;
    forward_fn call;
  } function = {.call = aoti_torch_cpu_convolution};
  const int64_t n = params->nspatial;
  HC_TRY(hc_depthwise_try_forward(input, weight, bias, params, out, status));
  if (*out != NULL) {
    return HC_OK;
  }
  HC_TRY(choose("aoti_torch_cuda_convolution", input, &function.pointer, status));
  HC_TRY_TORCH(status, function.call(input, weight, bias == NULL ? NULL : &bias, params->stride, n,
                                     params->padding, n, params->dilation, n, params->transposed,
                                     params->output_padding, n, params->groups, out));
done:
  return status->code;
}

hc_code hc_tensor_convolution_backward(AtenTensorHandle grad_output, AtenTensorHandle input,
                                       AtenTensorHandle weight, const hc_conv_params *params, bool need_input,
                                       bool need_weight, AtenTensorHandle *grad_input,
                                       AtenTensorHandle *grad_weight, hc_status *status) {
  union {
    void *pointer;
    backward_fn call;
  } function = {.call = aoti_torch_cpu_convolution_backward};
  const int64_t n = params->nspatial;
  AtenTensorHandle of_input = NULL, of_weight = NULL, no_bias = NULL;
  HC_TRY(hc_depthwise_try_backward(grad_output, input, weight, params, need_input, need_weight, grad_input,
                                   grad_weight, status));
  need_input = need_input && *grad_input == NULL;
  need_weight = need_weight && *grad_weight == NULL;
  if (!need_input && !need_weight) {
    return HC_OK;
  }
  const int32_t mask[3] = {need_input, need_weight, false};
  HC_TRY(choose("aoti_torch_cuda_convolution_backward", input, &function.pointer, status));
  HC_TRY_TORCH(status, function.call(grad_output, input, weight, NULL, 0, params->stride, n, params->padding,
                                     n, params->dilation, n, params->transposed, params->output_padding, n,
                                     params->groups, mask, 3, &of_input, &of_weight, &no_bias));
  /* What wasn't asked for comes back as a handle of an undefined tensor. */
  if (need_input) {
    *grad_input = of_input;
    of_input = NULL;
  }
  if (need_weight) {
    *grad_weight = of_weight;
    of_weight = NULL;
  }
done:
  hc_tensor_free(&of_input);
  hc_tensor_free(&of_weight);
  hc_tensor_free(&no_bias);
  return status->code;
}
