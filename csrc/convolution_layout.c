/* convolution_layout: see convolution_layout.h. */
#include "convolution_layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- checks and sizes ---- */

static hc_code check_tensors(const hc_convolution *conv, const hc_layout *layout, AtenTensorHandle bias,
                             hc_status *status) {
  const hc_shape *input = &layout->input, *weight = &layout->weight;
  const int64_t groups = conv->params.groups, channels = input->ndim > 1 ? input->sizes[1] : 0;
  if (input->ndim != layout->nspatial + 2 || weight->ndim != input->ndim) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "input has %" PRId64 " and weight %" PRId64 " dimensions, expected %" PRId64 " each",
                   input->ndim, weight->ndim, layout->nspatial + 2);
  }
  if (weight->dtype != input->dtype || weight->device_type != input->device_type) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "weight has another dtype or device than input, expected the same");
  }
  if (groups < 1 || channels % groups != 0 || weight->sizes[0] % groups != 0) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "groups is %" PRId64 ", expected a divisor of the %" PRId64
                   " input channels and of weight's %" PRId64,
                   groups, channels, weight->sizes[0]);
  }
  const int64_t expected = conv->params.transposed ? weight->sizes[0] : weight->sizes[1] * groups;
  if (channels != expected) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "input has %" PRId64 " channels, expected %" PRId64 " (weight and groups)", channels,
                   expected);
  }
  if (bias != NULL) {
    hc_shape shape;
    HC_TRY(hc_tensor_shape(bias, &shape, status));
    if (shape.ndim != 1 || shape.sizes[0] != layout->out.sizes[1] || shape.dtype != input->dtype) {
      return hc_fail(status, HC_ERROR_ARGUMENT,
                     "bias does not fit, expected shape (%" PRId64 ",) and input's dtype",
                     layout->out.sizes[1]);
    }
  }
done:
  return status->code;
}

hc_window hc_convolution_window(const hc_convolution *conv, int64_t d, int64_t kernel) {
  const hc_window window = {
      .kernel = kernel,
      .stride = conv->params.stride[d],
      .pad_lo = conv->pad_lo[d],
      .pad_hi = conv->pad_hi[d],
      .dilation = conv->params.dilation[d],
      .output_padding = conv->params.output_padding[d],
      .transposed = conv->params.transposed,
      .periodic = conv->periodic[d],
  };
  return window;
}

static hc_code work_out_dimension(const hc_convolution *conv, hc_layout *layout, int64_t d,
                                  hc_status *status) {
  hc_layout_dim *dim = &layout->dims[d];
  const hc_window window = hc_convolution_window(conv, d, layout->weight.sizes[2 + d]);
  const hc_axis axis = {
      .dim = 2 + d,
      .size = conv->world[d] > 1 ? conv->size[d] : layout->input.sizes[2 + d],
      .world = conv->world[d],
      .rank = conv->rank[d],
      .periodic = window.periodic,
      .group = conv->group[d],
  };
  HC_TRY(hc_window_check(&window, axis.size, axis.world, status));
  if (axis.rank < 0 || axis.rank >= axis.world) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "rank is %" PRId64 ", expected 0 to %" PRId64, axis.rank,
                   axis.world - 1);
  }
  dim->window = window;
  dim->planned = axis.world > 1 || window.periodic || window.pad_lo != window.pad_hi || window.pad_lo < 0;
  dim->in = axis;
  dim->out = axis;
  dim->out.size = hc_window_out_size(&window, axis.size);
  dim->out.periodic = false;
  dim->in_own = hc_shard(axis.size, axis.world, axis.rank);
  dim->out_own = hc_shard(dim->out.size, axis.world, axis.rank);
  if (layout->input.sizes[2 + d] != hc_length(dim->in_own)) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "the local input has size %" PRId64 " in dim %" PRId64 ", expected %" PRId64
                   ": the shard of rank %" PRId64 " of %" PRId64 " for a global size of %" PRId64,
                   layout->input.sizes[2 + d], 2 + d, hc_length(dim->in_own), axis.rank, axis.world,
                   axis.size);
  }
  layout->out.sizes[2 + d] = hc_length(dim->out_own);
  if (dim->planned) {
    dim->extents = malloc((size_t)axis.world * sizeof *dim->extents);
    if (dim->extents == NULL) {
      return hc_fail(status, HC_ERROR_MEMORY, "out of memory for the plan of %" PRId64 " ranks", axis.world);
    }
  }
done:
  return status->code;
}

hc_code hc_layout_init(const hc_convolution *conv, AtenTensorHandle input, AtenTensorHandle weight,
                       AtenTensorHandle bias, hc_layout *layout, hc_status *status) {
  memset(layout, 0, sizeof *layout);
  layout->nspatial = conv->params.nspatial;
  HC_TRY(hc_tensor_shape(input, &layout->input, status));
  HC_TRY(hc_tensor_shape(weight, &layout->weight, status));
  layout->out = layout->input;
  layout->out.sizes[1] =
      conv->params.transposed ? layout->weight.sizes[1] * conv->params.groups : layout->weight.sizes[0];
  HC_TRY(check_tensors(conv, layout, bias, status));
  for (int64_t d = 0; d < layout->nspatial; ++d) {
    HC_TRY(work_out_dimension(conv, layout, d, status));
  }
  hc_shape_set_strides(&layout->out, hc_shape_is_channels_last(&layout->input));
done:
  return status->code;
}

void hc_layout_free(hc_layout *layout) {
  for (int64_t d = 0; d < HC_MAX_SPATIAL; ++d) {
    free(layout->dims[d].extents);
    layout->dims[d].extents = NULL;
  }
}

/* ---- the two window maps, for all ranks ---- */

void hc_layout_use_reads(hc_layout *layout) {
  for (int64_t d = 0; d < layout->nspatial; ++d) {
    hc_layout_dim *dim = &layout->dims[d];
    const int64_t small_size = dim->window.transposed ? dim->in.size : dim->out.size;
    for (int64_t rank = 0; dim->planned && rank < dim->in.world; ++rank) {
      dim->extents[rank] = hc_window_reads(&dim->window, hc_shard(small_size, dim->in.world, rank));
    }
    memset(&dim->fit, 0, sizeof dim->fit);
    if (dim->planned) {
      dim->fit.extent = dim->extents[dim->in.rank];
    }
  }
}

void hc_layout_use_fits(hc_layout *layout) {
  for (int64_t d = 0; d < layout->nspatial; ++d) {
    hc_layout_dim *dim = &layout->dims[d];
    const int64_t big_size = dim->window.transposed ? dim->out.size : dim->in.size;
    for (int64_t rank = 0; dim->planned && rank < dim->in.world; ++rank) {
      const hc_fit fit = hc_window_fit(&dim->window, hc_shard(big_size, dim->in.world, rank));
      dim->extents[rank] = fit.extent;
      if (rank == dim->in.rank) {
        dim->fit = fit;
      }
    }
  }
}

hc_code hc_layout_assemble(const hc_layout *layout, AtenTensorHandle tensor, bool of_input, int64_t skipped,
                           hc_conv_params *params, const char *op, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle current = NULL, next = NULL;
  HC_TRY(hc_tensor_share(tensor, &current, status));
  for (int64_t d = 0; d < layout->nspatial; ++d) {
    const hc_layout_dim *dim = &layout->dims[d];
    if (!dim->planned) {
      params->padding[d] = dim->window.pad_lo;
      continue;
    }
    params->padding[d] = d == skipped ? 0 : dim->fit.padding;
    params->output_padding[d] = params->transposed && d != skipped ? dim->fit.output_padding : 0;
    if (d != skipped) {
      HC_TRY(hc_halo_exchange(current, of_input ? &dim->in : &dim->out, dim->extents, dim->fit.lead, 0.0, op,
                              &next, status));
      hc_tensor_free(&current);
      current = next;
      next = NULL;
    }
  }
  *out = current;
  current = NULL;
done:
  hc_tensor_free(&current);
  return status->code;
}
