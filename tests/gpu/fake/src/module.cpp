// What `torch._C` of a CUDA build has and the accelerator's general bindings do not tell.
#include "device.h"
#include "generator.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

PYBIND11_MODULE(fake_gpu_backend, module) {
  module.def("device_count", &fake::device_count);
  module.def("total_bytes", &fake::total_bytes);
  module.def("counts", [](bool reset) { return fake::counts().take(reset); }, pybind11::arg("reset") = false);
  module.def("pending", [](int device) { return fake::pending(static_cast<c10::DeviceIndex>(device)); });
  module.def("current_stream_id", [](int device) { return fake::current_stream(device).id(); });
  module.def("set_current_stream", [](int64_t id, int device) {
    fake::set_current_stream(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id));
  });
  module.def("set_memory_fraction", [](double fraction, int device) { fake::set_memory_fraction(device, fraction); });
  module.def("memory_fraction", [](int device) { return fake::memory_fraction(device); });
  module.def("sync_debug_mode", [] { return fake::sync_debug_mode; });
  module.def("set_sync_debug_mode", [](int mode) { fake::sync_debug_mode = mode; });
  module.def("default_generator", [](int device) {
    return pybind11::reinterpret_steal<pybind11::object>(THPGenerator_initDefaultGenerator(fake::default_generator(device)));
  });
}
