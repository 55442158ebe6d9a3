/* tensor: the few things the C core does with tensors, over torch_abi.h.
 *
 * Handles are owned by whoever received them through an `out` argument, and freed with hc_tensor_free, which
 * accepts NULL and sets NULL. Functions borrow the handles they are given. Shapes are read once into an
 * hc_shape, since each accessor is a call into libtorch.
 *
 * Memory format: only two are told apart, contiguous and channels_last (channels_last_3d in five dimensions). A tensor
 * that is dense in just one of them has that one; otherwise torch's reading of the strides decides
 * (suggest_memory_format). python/haloconv/_ops.py does the same, so that a traced program sees the strides it will meet.
 */
#ifndef HC_TENSOR_H
#define HC_TENSOR_H

#include "status.h"
#include "torch_abi.h"

enum { HC_MAX_DIM = 16, HC_MAX_SPATIAL = 3 };

typedef struct hc_shape {
  int64_t ndim;
  int64_t sizes[HC_MAX_DIM], strides[HC_MAX_DIM]; /* strides in elements */
  int32_t dtype, device_type, device_index;
} hc_shape;

hc_code hc_tensor_shape(AtenTensorHandle tensor, hc_shape *shape, hc_status *status);
int64_t hc_shape_numel(const hc_shape *shape);
bool hc_shape_is_channels_last(const hc_shape *shape);
/* Sets contiguous or channels_last strides for the shape's sizes. */
void hc_shape_set_strides(hc_shape *shape, bool channels_last);
bool hc_shape_on_cpu(const hc_shape *shape);

void hc_tensor_free(AtenTensorHandle *tensor);

hc_code hc_tensor_empty(const hc_shape *shape, AtenTensorHandle *out, hc_status *status);
hc_code hc_tensor_zeros(const hc_shape *shape, AtenTensorHandle *out, hc_status *status);
/* Uninitialised bytes on the device of `like`. */
hc_code hc_tensor_bytes(int64_t nbytes, const hc_shape *like, AtenTensorHandle *out, hc_status *status);
/* Another reference to the same tensor. */
hc_code hc_tensor_share(AtenTensorHandle tensor, AtenTensorHandle *out, hc_status *status);
/* Replaces *tensor by a copy in the asked memory format, if its strides say another one. */
hc_code hc_tensor_make_format(AtenTensorHandle *tensor, bool channels_last, hc_status *status);
/* Replaces *tensor by a copy if it is `other` itself: an op must not return its argument. */
hc_code hc_tensor_unalias(AtenTensorHandle *tensor, AtenTensorHandle other, hc_status *status);
/* Puts an empty tensor of shape (0,) and the dtype and device of `like` where *tensor is NULL. */
hc_code hc_tensor_absent(AtenTensorHandle like, AtenTensorHandle *tensor, hc_status *status);

/* Sum over all dimensions but 1: what a bias gradient is. Shape (C,). */
hc_code hc_tensor_sum_to_channels(AtenTensorHandle tensor, AtenTensorHandle *out, hc_status *status);

/* The elements as one contiguous row, shape (1, numel): a view where that is possible. */
hc_code hc_tensor_as_row(AtenTensorHandle tensor, AtenTensorHandle *out, hc_status *status);
/* The "sum", "max" or "min" over the rows of an (n, numel) tensor, with the sizes of `shape`. */
hc_code hc_tensor_reduce_rows(AtenTensorHandle rows, const char *reduction, const hc_shape *shape,
                              AtenTensorHandle *out, hc_status *status);

/* The parameters of a local convolution, in ATen's terms. */
typedef struct hc_conv_params {
  int64_t nspatial;
  int64_t stride[HC_MAX_SPATIAL], padding[HC_MAX_SPATIAL], dilation[HC_MAX_SPATIAL],
      output_padding[HC_MAX_SPATIAL];
  bool transposed;
  int64_t groups;
} hc_conv_params;

/* bias may be NULL. */
hc_code hc_tensor_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                              const hc_conv_params *params, AtenTensorHandle *out, hc_status *status);
/* What is not needed isn't computed, and comes back as NULL. */
hc_code hc_tensor_convolution_backward(AtenTensorHandle grad_output, AtenTensorHandle input,
                                       AtenTensorHandle weight, const hc_conv_params *params, bool need_input,
                                       bool need_weight, AtenTensorHandle *grad_input,
                                       AtenTensorHandle *grad_weight, hc_status *status);

#endif
