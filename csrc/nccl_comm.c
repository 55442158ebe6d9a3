/* nccl_comm: see nccl_comm.h. */
#define _POSIX_C_SOURCE 200809L /* NOLINT(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp) */
#include "nccl_comm.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER, table = PTHREAD_MUTEX_INITIALIZER;
static hc_comm *comms; /* entries are used again, but never freed or moved: the watch walks over them */
static int64_t made;   /* how many communicators */
static hc_flight *idle_flights; /* their events are made, and used again */

/* How long the end of a process or group waits for exchanges that are still under way. */
static const double FAREWELL_S = 10;

void hc_comm_lock_order(void) { (void)pthread_mutex_lock(&order); }
void hc_comm_unlock_order(void) { (void)pthread_mutex_unlock(&order); }

double hc_clock(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void pause_a_little(int64_t *round) {
  const struct timespec pause = {0, *round < 100 ? 10000 : 1000000}; /* 10 us, then 1 ms */
  ++*round;
  (void)nanosleep(&pause, NULL);
}

static bool is_named(const hc_comm *comm, const char *group) {
  return comm->group[0] != '\0' && strcmp(comm->group, group) == 0;
}

/* ---- breaking ---- */

/* `table` is held. */
static void break_locked(hc_comm *comm, const char *reason) {
  if (!comm->broken) {
    comm->broken = true;
    if (!comm->warned) { /* else the reason is the peer's */
      (void)snprintf(comm->reason, sizeof comm->reason, "%s", reason);
    }
  }
}

void hc_comm_warn(const char *group, int64_t generation, int64_t last_good, const char *reason) {
  (void)pthread_mutex_lock(&table);
  for (hc_comm *comm = comms; comm != NULL; comm = comm->next) {
    if (is_named(comm, group) && comm->generation == generation && !comm->broken &&
        (!comm->warned || last_good < comm->last_good)) {
      comm->warned = true;
      comm->last_good = last_good;
      (void)snprintf(comm->reason, sizeof comm->reason, "%s", reason);
    }
  }
  (void)pthread_mutex_unlock(&table);
}

/* `table` is held. */
static bool is_hopeless(const hc_comm *comm, int64_t number) {
  return comm->broken || (comm->warned && number > comm->last_good);
}

hc_code hc_comm_check(hc_comm *comm, int64_t serial, int64_t number, hc_status *status) {
  (void)pthread_mutex_lock(&table);
  if (is_hopeless(comm, number)) {
    (void)hc_fail(status, HC_ERROR_TORCH, "%s", comm->reason);
  } else if (comm->serial != serial) {
    (void)hc_fail(status, HC_ERROR_TORCH, "the group's communicator was closed during an exchange");
  }
  (void)pthread_mutex_unlock(&table);
  return status->code;
}

/* Why an exchange, or the set-up, is taken for stuck; NCCL's own word with it. */
static void say_stuck(const hc_nccl_api *api, const hc_comm *comm, const char *what, char *text,
                      size_t room) {
  const char *last = api->ncclGetLastError(comm->comm), *p2p = getenv("NCCL_P2P_DISABLE");
  (void)snprintf(
      text, room,
      "%s of group '%s' was not through after %.0f s; NCCL's last error: '%s'. A peer is stuck or gone, or "
      "its card cannot be reached%s",
      what, comm->group, comm->timeout_s, last == NULL ? "" : last,
      p2p == NULL ? ": within one machine NCCL_P2P_DISABLE=1 makes NCCL go another way" : "");
}

hc_code hc_comm_settle(hc_comm *comm, const char *what, hc_status *status) {
  const hc_nccl_api *api = NULL;
  ncclResult_t state = ncclSuccess;
  const double deadline = hc_clock() + comm->timeout_s;
  int64_t round = 0;
  HC_TRY(hc_nccl_api_get(&api, status));
  for (;;) {
    HC_TRY_NCCL(api, status, comm->comm, ncclCommGetAsyncError(comm->comm, &state));
    if (state != ncclInProgress) {
      break;
    }
    HC_TRY(hc_comm_check(comm, comm->serial, comm->exchanges + 1, status));
    if (hc_clock() > deadline) {
      char text[HC_MESSAGE_SIZE];
      say_stuck(api, comm, what, text, sizeof text);
      (void)hc_fail(status, HC_ERROR_TORCH, "%s", text);
      goto done;
    }
    pause_a_little(&round);
  }
  HC_TRY(hc_check_nccl(api, status, state, comm->comm, what));
done:
  return status->code;
}

/* Whether the device is through with it, or has been stopped. `table` is held. Another thread may be capturing a graph,
 * which a query in the usual mode would spoil. */
static bool is_through(const hc_nccl_api *api, const hc_comm *comm, const hc_flight *flight) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (comm->comm == NULL || comm->serial != flight->serial) {
    return true;
  }
  (void)api->cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t state = api->cudaEventQuery(flight->done);
  (void)api->cudaThreadExchangeStreamCaptureMode(&mode);
  if (state != cudaSuccess) {
    (void)api->cudaGetLastError();
  }
  return state == cudaSuccess;
}

/* Lets what is in flight finish, as long as there is hope, and not for ever. */
static void let_finish(const hc_nccl_api *api, hc_comm *comm) {
  const double deadline = hc_clock() + FAREWELL_S;
  int64_t round = 0;
  bool going = true;
  while (going && hc_clock() < deadline) {
    (void)pthread_mutex_lock(&table);
    going = comm->newest != NULL && comm->oldest != NULL && !is_hopeless(comm, comm->newest->number) &&
            !is_through(api, comm, comm->newest);
    (void)pthread_mutex_unlock(&table);
    if (going) {
      pause_a_little(&round);
    }
  }
}

/* Ends the kernels that wait for a peer. The exchanges that they were do not count as posted: a peer may lack them. */
static void give_up(const hc_nccl_api *api, hc_comm *comm) {
  (void)pthread_mutex_lock(&table);
  for (const hc_flight *flight = comm->oldest; flight != NULL; flight = flight->next) {
    if (!is_through(api, comm, flight)) {
      comm->exchanges = flight->number - 1;
      break;
    }
  }
  (void)pthread_mutex_unlock(&table);
  (void)api->ncclCommAbort(comm->comm);
  comm->comm = NULL;
}

void hc_comm_abort(hc_comm *comm, bool capturing, const hc_status *status) {
  const hc_nccl_api *api = NULL;
  hc_status ignored = {HC_OK, ""};
  if (hc_nccl_api_get(&api, &ignored) == HC_OK) {
    if (comm->comm != NULL) {
      let_finish(api, comm);
      give_up(api, comm);
    }
    if (!capturing) { /* nothing runs during a capture */
      (void)hc_check_cuda(api, &ignored, api->cudaStreamSynchronize(comm->stream), "cudaStreamSynchronize");
    }
  }
  (void)pthread_mutex_lock(&table);
  break_locked(comm, status->message);
  (void)pthread_mutex_unlock(&table);
}

/* ---- making ---- */

hc_comm *hc_comm_find(const char *group, int32_t device) {
  hc_comm *found = NULL;
  (void)pthread_mutex_lock(&table);
  for (hc_comm *comm = comms; comm != NULL && found == NULL; comm = comm->next) {
    if (is_named(comm, group) && comm->device == device) {
      found = comm;
    }
  }
  (void)pthread_mutex_unlock(&table);
  return found;
}

hc_code hc_comm_new_id(ncclUniqueId *id, hc_status *status) {
  const hc_nccl_api *api = NULL;
  HC_TRY(hc_nccl_api_get(&api, status));
  HC_TRY_NCCL(api, status, NULL, ncclGetUniqueId(id));
done:
  return status->code;
}

/* An entry of this name, to be released if making the communicator fails. */
static hc_comm *new_entry(const char *group, int64_t generation, int32_t device, hc_status *status) {
  (void)pthread_mutex_lock(&table);
  hc_comm *entry = comms;
  while (entry != NULL && (entry->group[0] != '\0' || entry->oldest != NULL)) {
    entry = entry->next;
  }
  if (entry == NULL) {
    entry = calloc(1, sizeof *entry);
    if (entry != NULL) {
      entry->next = comms;
      comms = entry;
    }
  }
  if (entry == NULL) {
    (void)hc_fail(status, HC_ERROR_MEMORY, "out of memory for a communicator");
  } else {
    (void)snprintf(entry->group, sizeof entry->group, "%s", group);
    entry->device = device;
    entry->generation = generation;
    entry->broken = entry->warned = false;
    entry->exchanges = 0;
    entry->number = ++made;
  }
  (void)pthread_mutex_unlock(&table);
  return entry;
}

/* The entry is free for another group from now on. */
static void release_entry(hc_comm *comm) {
  (void)pthread_mutex_lock(&table);
  comm->group[0] = '\0';
  ++comm->serial;
  (void)pthread_mutex_unlock(&table);
}

hc_code hc_comm_connect(const char *group, int64_t generation, int32_t device, int64_t rank, int64_t world,
                        const ncclUniqueId *id, double timeout_s, hc_status *status) {
  const hc_nccl_api *api = NULL;
  hc_comm *comm = NULL;
  int before = 0;
  bool switched = false;
  void *stream = NULL;
  ncclConfig_t config;
  memset(&config, 0, sizeof config);
  config.size = HC_NCCL_CONFIG_BYTES;
  config.magic = HC_NCCL_MAGIC;
  config.version = HC_NCCL_FLOOR;
  config.blocking = 0;
  hc_comm_lock_order();
  if (strlen(group) >= HC_GROUP_NAME_SIZE) {
    (void)hc_fail(status, HC_ERROR_ARGUMENT, "the group's name is '%s', expected at most %d characters",
                  group, HC_GROUP_NAME_SIZE - 1);
    goto done;
  }
  HC_TRY(hc_nccl_api_get(&api, status));
  HC_TRY_CUDA(api, status, cudaGetDevice(&before));
  HC_TRY_CUDA(api, status, cudaSetDevice(device));
  switched = true;
  HC_TRY_TORCH(status, api->torch_get_cuda_stream_from_pool(true, device, &stream));
  comm = new_entry(group, generation, device, status);
  if (comm == NULL) {
    goto done;
  }
  comm->rank = rank;
  comm->world = world;
  comm->timeout_s = timeout_s;
  comm->stream = stream;
  HC_TRY_NCCL(api, status, NULL, ncclCommInitRankConfig(&comm->comm, (int)world, *id, (int)rank, &config));
  HC_TRY(hc_comm_settle(comm, "setting up NCCL", status));
done:
  if (status->code != HC_OK && comm != NULL) {
    hc_comm_abort(comm, false, status);
    release_entry(comm);
  }
  if (switched) {
    (void)api->cudaSetDevice(before);
  }
  hc_comm_unlock_order();
  return status->code;
}

/* ---- exchanges in flight ---- */

hc_code hc_flight_new(int32_t device, hc_flight **out, hc_status *status) {
  const hc_nccl_api *api = NULL;
  hc_flight *flight = NULL;
  (void)pthread_mutex_lock(&table);
  hc_flight **link = &idle_flights;
  while (*link != NULL && (*link)->device != device) {
    link = &(*link)->next;
  }
  if (*link != NULL) {
    flight = *link;
    *link = flight->next;
  }
  (void)pthread_mutex_unlock(&table);
  if (flight != NULL) {
    *out = flight;
    return HC_OK;
  }
  HC_TRY(hc_nccl_api_get(&api, status));
  flight = calloc(1, sizeof *flight);
  if (flight == NULL) {
    (void)hc_fail(status, HC_ERROR_MEMORY, "out of memory for an exchange");
    goto done;
  }
  flight->device = device;
  HC_TRY_CUDA(api, status, cudaEventCreateWithFlags(&flight->ready, cudaEventDisableTiming));
  HC_TRY_CUDA(api, status, cudaEventCreateWithFlags(&flight->done, cudaEventDisableTiming));
  *out = flight;
  flight = NULL;
done:
  if (flight != NULL && flight->ready != NULL) {
    (void)api->cudaEventDestroy(flight->ready);
  }
  free(flight);
  return status->code;
}

void hc_flight_free(hc_flight *flight) {
  for (int64_t i = 0; i < flight->nheld; ++i) {
    hc_tensor_free(&flight->held[i]);
  }
  free(flight->held);
  flight->held = NULL;
  flight->nheld = 0;
  flight->captured = flight->waited = false;
  flight->comm = NULL;
  (void)pthread_mutex_lock(&table);
  flight->next = idle_flights;
  idle_flights = flight;
  (void)pthread_mutex_unlock(&table);
}

void hc_flight_add(hc_flight *flight) {
  hc_comm *comm = flight->comm;
  (void)pthread_mutex_lock(&table);
  flight->next = NULL;
  if (comm->oldest == NULL) {
    comm->oldest = flight;
  } else {
    comm->newest->next = flight;
  }
  comm->newest = flight;
  (void)pthread_mutex_unlock(&table);
}

void hc_flight_waited(hc_flight *flight) {
  (void)pthread_mutex_lock(&table);
  flight->waited = true;
  (void)pthread_mutex_unlock(&table);
}

void hc_comm_retire(hc_comm *comm) {
  const hc_nccl_api *api = NULL;
  hc_status ignored = {HC_OK, ""};
  if (hc_nccl_api_get(&api, &ignored) != HC_OK) {
    return;
  }
  for (;;) {
    hc_flight *first = NULL;
    (void)pthread_mutex_lock(&table);
    if (comm->oldest != NULL && comm->oldest->waited && is_through(api, comm, comm->oldest)) {
      first = comm->oldest;
      comm->oldest = first->next;
    }
    (void)pthread_mutex_unlock(&table);
    if (first == NULL) {
      return;
    }
    hc_flight_free(first);
  }
}

/* ---- the watch ---- */

/* `order` is held: NCCL's own errors, timeouts, and the abort of what is broken. */
static void look_after(const hc_nccl_api *api, hc_comm *comm) {
  ncclResult_t state = ncclSuccess;
  char text[HC_MESSAGE_SIZE] = "";
  if (comm->comm == NULL) {
    return;
  }
  const ncclResult_t asked = api->ncclCommGetAsyncError(comm->comm, &state);
  (void)pthread_mutex_lock(&table);
  const hc_flight *late = comm->oldest;
  if (asked == ncclSuccess && state != ncclSuccess && state != ncclInProgress) {
    const char *last = api->ncclGetLastError(comm->comm);
    (void)snprintf(text, sizeof text, "%s of group '%s': NCCL: %s, last error '%s'",
                   late == NULL ? "the communicator" : late->what, comm->group,
                   api->ncclGetErrorString(state), last == NULL ? "" : last);
  } else if (late != NULL && hc_clock() > late->deadline && !is_through(api, comm, late)) {
    say_stuck(api, comm, late->what, text, sizeof text);
  }
  if (text[0] != '\0' || (late != NULL && is_hopeless(comm, late->number) && !is_through(api, comm, late))) {
    break_locked(comm, text);
  }
  const bool broken = comm->broken;
  (void)pthread_mutex_unlock(&table);
  if (broken) {
    give_up(api, comm);
  }
}

void hc_comm_look(hc_comm *comm) {
  const hc_nccl_api *api = NULL;
  hc_status ignored = {HC_OK, ""};
  if (hc_nccl_api_get(&api, &ignored) == HC_OK) {
    hc_comm_lock_order();
    look_after(api, comm);
    hc_comm_unlock_order();
  }
}

void hc_comm_watch(char *busy, size_t room) {
  const hc_nccl_api *api = NULL;
  hc_status ignored = {HC_OK, ""};
  size_t used = 0;
  busy[0] = '\0';
  if (hc_nccl_api_get(&api, &ignored) != HC_OK) {
    return;
  }
  (void)pthread_mutex_lock(&table);
  hc_comm *comm = comms;
  (void)pthread_mutex_unlock(&table);
  for (; comm != NULL; comm = comm->next) {
    /* Whoever holds `order` sets up or launches, and watches for itself but for what peers report. */
    const bool calling = pthread_mutex_trylock(&order) != 0;
    if (!calling) {
      (void)api->cudaSetDevice(comm->device); /* this thread has no other use for it */
      look_after(api, comm);
      (void)pthread_mutex_unlock(&order);
    }
    hc_comm_retire(comm);
    (void)pthread_mutex_lock(&table);
    if ((comm->oldest != NULL || calling) && comm->group[0] != '\0' &&
        used + strlen(comm->group) + 2 < room) {
      used += (size_t)snprintf(busy + used, room - used, "%s%s", used == 0 ? "" : ",", comm->group);
    }
    (void)pthread_mutex_unlock(&table);
  }
}

/* ---- the end ---- */

int64_t hc_comm_close_failed(const char *group) {
  const hc_nccl_api *api = NULL;
  hc_status failure = {HC_OK, ""};
  int64_t posted = 0;
  if (hc_nccl_api_get(&api, &failure) != HC_OK) {
    return 0;
  }
  (void)hc_fail(&failure, HC_ERROR_TORCH, "the communicator was given up after an error");
  hc_comm_lock_order();
  for (hc_comm *comm = comms; comm != NULL; comm = comm->next) {
    if (is_named(comm, group)) {
      hc_comm_abort(comm, false, &failure);
      posted = comm->exchanges;
      release_entry(comm);
      hc_comm_retire(comm);
    }
  }
  hc_comm_unlock_order();
  return posted;
}

/* Finalizes, which lets what is in flight finish, and destroys; aborts what does not come to an end. */
static void say_farewell(const hc_nccl_api *api, hc_comm *comm) {
  hc_status status = {HC_OK, ""};
  if (comm->comm != NULL && !comm->broken) {
    const double timeout_s = comm->timeout_s;
    comm->timeout_s = timeout_s < FAREWELL_S ? timeout_s : FAREWELL_S;
    HC_TRY_NCCL(api, &status, comm->comm, ncclCommFinalize(comm->comm));
    HC_TRY(hc_comm_settle(comm, "finalizing NCCL", &status));
    HC_TRY_NCCL(api, &status, comm->comm, ncclCommDestroy(comm->comm));
    comm->comm = NULL;
  }
done:
  if (status.code == HC_OK) {
    (void)hc_fail(&status, HC_ERROR_TORCH, "the communicator was destroyed");
  }
  hc_comm_abort(comm, false, &status);
}

static hc_comm *newest(const char *group) {
  hc_comm *found = NULL;
  for (hc_comm *comm = comms; comm != NULL; comm = comm->next) {
    if (comm->group[0] != '\0' && (group == NULL || is_named(comm, group)) &&
        (found == NULL || comm->number > found->number)) {
      found = comm;
    }
  }
  return found;
}

void hc_comm_destroy(const char *group) {
  const hc_nccl_api *api = NULL;
  hc_status ignored = {HC_OK, ""};
  if (hc_nccl_api_get(&api, &ignored) != HC_OK) {
    return;
  }
  hc_comm_lock_order();
  for (hc_comm *comm = newest(group); comm != NULL; comm = newest(group)) {
    (void)api->cudaSetDevice(comm->device);
    say_farewell(api, comm);
    release_entry(comm);
    hc_comm_retire(comm);
  }
  if (group == NULL) { /* the end of the process */
    while (idle_flights != NULL) {
      hc_flight *flight = idle_flights;
      idle_flights = flight->next;
      (void)api->cudaEventDestroy(flight->ready);
      (void)api->cudaEventDestroy(flight->done);
      free(flight);
    }
  }
  hc_comm_unlock_order();
}
