// NVIDIA's management library for the fake GPU. A call that is not here is one that the driver does not have.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6 };

static int number_from(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

static unsigned long long memory(void) {
  const char* text = getenv("FAKE_GPU_MEMORY");
  return text ? strtoull(text, NULL, 10) : 4ULL << 30;
}

EXPORT int nvmlInit_v2(void) { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
EXPORT int nvmlShutdown(void) { return SUCCESS; }
EXPORT const char* nvmlErrorString(int code) { return code == NOT_FOUND ? "Not Found" : "Invalid Argument"; }

EXPORT int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  snprintf(text, length, "999.0");
  return SUCCESS;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = (unsigned)number_from("FAKE_GPU_COUNT", 1);
  return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, size_t* handle) {
  if (index >= (unsigned)number_from("FAKE_GPU_COUNT", 1)) {
    return INVALID_ARGUMENT;
  }
  *handle = index + 1;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetName(size_t handle, char* text, unsigned length) {
  snprintf(text, length, "Fake GPU");
  return SUCCESS;
}

EXPORT int nvmlDeviceGetUUID(size_t handle, char* text, unsigned length) {
  snprintf(text, length, "GPU-00000000-0000-0000-0000-%012zu", handle);
  return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(size_t handle, unsigned long long* total_free_used) {
  total_free_used[0] = total_free_used[1] = memory();
  total_free_used[2] = 0;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(size_t handle, int* major, int* minor) {
  const char* text = getenv("FAKE_GPU_CAPABILITY");
  *major = 8;
  *minor = 0;
  if (text) {
    sscanf(text, "%d.%d", major, minor);
  }
  return SUCCESS;
}

EXPORT int nvmlDeviceGetClockInfo(size_t handle, int kind, unsigned* megahertz) {
  *megahertz = 1000;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxClockInfo(size_t handle, int kind, unsigned* megahertz) {
  *megahertz = 1500;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetPowerUsage(size_t handle, unsigned* milliwatts) {
  *milliwatts = 100000;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(size_t handle, int sensor, unsigned* degrees) {
  *degrees = 50;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(size_t handle, unsigned long long* reasons) {
  *reasons = (unsigned long long)number_from("FAKE_GPU_SLOWDOWNS", 0);
  return SUCCESS;
}
