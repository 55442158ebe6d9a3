/* torch_abi: the part of libtorch's stable C ABI that haloconv uses, as C prototypes.
 *
 * libtorch exports these symbols with C linkage and C types, but the headers that declare them are C++.
 * So they are declared here again. tests/test_torch_abi.py compiles this file behind torch's own headers
 * (a wrong prototype is a conflicting declaration) and looks every name up in libtorch.
 *
 * Ownership: a handle that comes back through a last pointer argument is owned by the caller, unless the
 * comment says "borrowed". Functions return 0 on success.
 */
#ifndef HC_TORCH_ABI_H
#define HC_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus /* only for the test that compares this file with torch's headers */
extern "C" {
#else
typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef struct StableListOpaque *StableListHandle;
typedef struct StringOpaque *StringHandle;
typedef uint64_t StableIValue;
#endif

/* Tensors */
int32_t aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
int32_t aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle *out);
int32_t aoti_torch_get_dim(AtenTensorHandle tensor, int64_t *out);
int32_t aoti_torch_get_data_ptr(AtenTensorHandle tensor, void **borrowed);
int32_t aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t **borrowed);
int32_t aoti_torch_get_strides(AtenTensorHandle tensor, int64_t **borrowed);
int32_t aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t *out);
int32_t aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t *out);
int32_t aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t *out);
int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, AtenTensorHandle *out);
/* `storage_offset` is counted from the tensor's own storage offset. */
int32_t aoti_torch__reinterpret_tensor(AtenTensorHandle tensor, int64_t ndim, const int64_t *sizes,
                                       const int64_t *strides, int64_t storage_offset, AtenTensorHandle *out);
/* A view of `pool`'s storage with another dtype. */
int32_t aoti_torch__alloc_from_pool(AtenTensorHandle pool, int64_t offset_bytes, int32_t dtype, int64_t ndim,
                                    const int64_t *sizes, const int64_t *strides, AtenTensorHandle *out);
int32_t aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle source, int32_t non_blocking);
int32_t aoti_torch_zero_(AtenTensorHandle self);
int32_t aoti_torch_aten_fill__Scalar(AtenTensorHandle self, double value);
int32_t aoti_torch_aten_subtract_Tensor(AtenTensorHandle self, AtenTensorHandle other, double alpha,
                                        AtenTensorHandle *out);

/* Runs `function` on parts of [begin, end) of at least `grain` on torch's threads; returns when all are done. */
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                           void (*function)(int64_t begin, int64_t end, void *context), void *context);

/* Numbers for dtypes and devices */
size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_dtype_uint8(void);
int32_t aoti_torch_dtype_float64(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_float16(void);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_device_type_cuda(void);

/* Convolution on the CPU; the CUDA twins have the same types and live in libtorch_cuda. */
int32_t aoti_torch_cpu_convolution(AtenTensorHandle input, AtenTensorHandle weight,
                                   AtenTensorHandle *bias_or_null, const int64_t *stride, int64_t stride_len,
                                   const int64_t *padding, int64_t padding_len, const int64_t *dilation,
                                   int64_t dilation_len, int32_t transposed, const int64_t *output_padding,
                                   int64_t output_padding_len, int64_t groups, AtenTensorHandle *out);
int32_t aoti_torch_cpu_convolution_backward(AtenTensorHandle grad_output, AtenTensorHandle input,
                                            AtenTensorHandle weight, const int64_t **bias_sizes_or_null,
                                            int64_t bias_sizes_len, const int64_t *stride, int64_t stride_len,
                                            const int64_t *padding, int64_t padding_len,
                                            const int64_t *dilation, int64_t dilation_len, int32_t transposed,
                                            const int64_t *output_padding, int64_t output_padding_len,
                                            int64_t groups, const int32_t *output_mask,
                                            int64_t output_mask_len, AtenTensorHandle *grad_input,
                                            AtenTensorHandle *grad_weight, AtenTensorHandle *grad_bias);

/* Lists and strings */
int32_t torch_new_list_reserve_size(size_t size, StableListHandle *out);
int32_t torch_list_size(StableListHandle list, size_t *out);
int32_t torch_list_get_item(StableListHandle list, size_t index, StableIValue *out);
int32_t torch_list_push_back(StableListHandle list, StableIValue item);
int32_t torch_delete_list(StableListHandle list);
int32_t torch_delete_string(StringHandle string);
int32_t torch_string_length(StringHandle string, size_t *out);
int32_t torch_string_c_str(StringHandle string, const char **borrowed);

/* Dispatcher and registration */
int32_t torch_call_dispatcher(const char *name, const char *overload, StableIValue *stack,
                              uint64_t abi_version);
int32_t aoti_torch_library_init_fragment(const char *name_space, const char *file, uint32_t line,
                                         TorchLibraryHandle *out);
int32_t aoti_torch_library_init_impl(const char *name_space, const char *dispatch_key, const char *file,
                                     uint32_t line, TorchLibraryHandle *out);
int32_t aoti_torch_library_def(TorchLibraryHandle library, const char *schema);
int32_t torch_library_impl(TorchLibraryHandle library, const char *name,
                           void (*kernel)(StableIValue *, uint64_t, uint64_t), uint64_t abi_version);
int32_t aoti_torch_delete_library_object(TorchLibraryHandle library);

/* Throws when `condition` is false: unwinds through the C frames above it, which run no cleanup. */
void aoti_torch_check(bool condition, const char *function, const char *file, uint32_t line,
                      const char *message);

/* Newer than the oldest supported torch: NULL where the running one lacks them. */
/* since 2.13; borrowed until the thread's next exception */
const char *torch_exception_get_what_without_backtrace(void) __attribute__((weak));

#ifdef __cplusplus
}
#endif

#endif
