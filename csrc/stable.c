/* stable: see stable.h. */
#include "stable.h"

#include <inttypes.h>
#include <string.h>

_Static_assert(sizeof(StableIValue) == sizeof(uintptr_t), "handles travel in a StableIValue");

/* ---- tensors ---- */

hc_code hc_stable_from_tensor(AtenTensorHandle tensor, StableIValue *out, hc_status *status) {
  AtenTensorHandle reference = NULL;
  HC_TRY_TORCH(status, aoti_torch_new_tensor_handle(tensor, &reference));
  *out = (StableIValue)(uintptr_t)reference;
done:
  return status->code;
}

AtenTensorHandle hc_stable_to_tensor(StableIValue value) { return (AtenTensorHandle)(uintptr_t)value; }

void hc_stable_free_tensor(StableIValue *value) {
  if (*value != 0) {
    (void)aoti_torch_delete_tensor_object(hc_stable_to_tensor(*value));
    *value = 0;
  }
}

/* ---- numbers ---- */

int64_t hc_stable_to_int(StableIValue value) { return (int64_t)value; }

bool hc_stable_to_bool(StableIValue value) {
  bool result = false;
  memcpy(&result, &value, sizeof result);
  return result;
}

double hc_stable_to_double(StableIValue value) {
  double result = 0;
  memcpy(&result, &value, sizeof result);
  return result;
}

/* ---- lists ---- */

static StableListHandle as_list(StableIValue value) { return (StableListHandle)(uintptr_t)value; }

hc_code hc_stable_from_ints(const int64_t *items, int64_t count, StableIValue *out, hc_status *status) {
  StableIValue list = 0;
  StableListHandle handle = NULL;
  HC_TRY_TORCH(status, torch_new_list_reserve_size((size_t)count, &handle));
  list = (StableIValue)(uintptr_t)handle;
  for (int64_t i = 0; i < count; ++i) {
    HC_TRY_TORCH(status, torch_list_push_back(handle, (StableIValue)items[i]));
  }
  *out = list;
  list = 0;
done:
  hc_stable_free_list(&list);
  return status->code;
}

hc_code hc_stable_from_tensors(const AtenTensorHandle *items, int64_t count, StableIValue *out,
                               hc_status *status) {
  StableIValue list = 0, item = 0;
  StableListHandle handle = NULL;
  HC_TRY_TORCH(status, torch_new_list_reserve_size((size_t)count, &handle));
  list = (StableIValue)(uintptr_t)handle;
  for (int64_t i = 0; i < count; ++i) {
    HC_TRY(hc_stable_from_tensor(items[i], &item, status));
    HC_TRY_TORCH(status, torch_list_push_back(handle, item));
    item = 0;
  }
  *out = list;
  list = 0;
done:
  hc_stable_free_tensor(&item);
  hc_stable_free_tensor_list(&list);
  return status->code;
}

hc_code hc_stable_to_ints(StableIValue list, const char *what, int64_t capacity, int64_t *items,
                          int64_t *count, hc_status *status) {
  size_t size = 0;
  HC_TRY_TORCH(status, torch_list_size(as_list(list), &size));
  if (size > (size_t)capacity) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "%s has %zu entries, expected at most %" PRId64, what, size,
                   capacity);
  }
  for (size_t i = 0; i < size; ++i) {
    StableIValue item = 0;
    HC_TRY_TORCH(status, torch_list_get_item(as_list(list), i, &item));
    items[i] = (int64_t)item;
  }
  *count = (int64_t)size;
done:
  return status->code;
}

hc_code hc_stable_to_optional_tensor(StableIValue list, AtenTensorHandle *out, hc_status *status) {
  size_t size = 0;
  StableIValue item = 0; /* borrowed from the list */
  HC_TRY_TORCH(status, torch_list_size(as_list(list), &size));
  if (size > 1) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "bias has %zu tensors, expected none or one", size);
  }
  if (size == 1) {
    HC_TRY_TORCH(status, torch_list_get_item(as_list(list), 0, &item));
    HC_TRY_TORCH(status, aoti_torch_new_tensor_handle(hc_stable_to_tensor(item), out));
  }
done:
  return status->code;
}

void hc_stable_free_list(StableIValue *value) {
  if (*value != 0) {
    (void)torch_delete_list(as_list(*value));
    *value = 0;
  }
}

void hc_stable_free_tensor_list(StableIValue *value) {
  size_t size = 0;
  if (*value != 0 && torch_list_size(as_list(*value), &size) == 0) {
    for (size_t i = 0; i < size; ++i) {
      StableIValue item = 0;
      if (torch_list_get_item(as_list(*value), i, &item) == 0) {
        hc_stable_free_tensor(&item);
      }
    }
  }
  hc_stable_free_list(value);
}

/* ---- strings ---- */

hc_code hc_stable_from_text(const char *text, StableIValue *out, hc_status *status) {
  int64_t bytes[HC_MESSAGE_SIZE];
  int64_t count = 0;
  while (text[count] != '\0' && count < HC_MESSAGE_SIZE) {
    bytes[count] = (unsigned char)text[count];
    ++count;
  }
  return hc_stable_from_ints(bytes, count, out, status);
}

hc_code hc_stable_to_string(StableIValue value, const char **borrowed, hc_status *status) {
  HC_TRY_TORCH(status, torch_string_c_str((StringHandle)(uintptr_t)value, borrowed));
done:
  return status->code;
}

void hc_stable_free_string(StableIValue *value) {
  if (*value != 0) {
    (void)torch_delete_string((StringHandle)(uintptr_t)*value);
    *value = 0;
  }
}
