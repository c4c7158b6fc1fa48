#include "bind.h"
#include "pool.h"
#include "variants.h"

void bind_pool(nb::module_& m) {
    m.def("variants", [] {
        std::vector<std::string> names;
        for (const mill::Kernels* k : mill::usable_kernels()) names.push_back(k->name);
        return names;
    }, "Kernel variants that this CPU can run, fastest first.");
    nb::class_<mill::Pool>(m, "Pool", "Threads for native work; the calling thread is one of them.")
        .def(nb::init<int, std::vector<int>>(), nb::arg("threads"), nb::arg("cpus"))
        .def("give_way", &mill::Pool::give_way)
        .def_prop_ro("threads", &mill::Pool::threads);
}
