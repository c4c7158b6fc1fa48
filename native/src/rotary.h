// Sine and cosine in float64 as docs/numerics.md spells them out.
#pragma once

#include <cmath>

namespace mill {

inline void sin_cos(double angle, float& sine, float& cosine) {
    const double n = std::nearbyint(angle * 0.63661977236758134308);
    const double r = ((angle - n * 1.57079632673412561417) - n * 6.07710050630396597660e-11) - n * 2.02226624871116645580e-21;
    const double z = r * r;
    const double s = ((((1.58969099521155010221e-10 * z + -2.50507602534068634195e-8) * z + 2.75573137070700676789e-6) * z +
                       -1.98412698298579493134e-4) * z + 8.33333333332248946124e-3) * z + -1.66666666666666324348e-1;
    const double c = ((((-1.13596475577881948265e-11 * z + 2.08757232129817482790e-9) * z + -2.75573143513906633035e-7) * z +
                       2.48015872894767294178e-5) * z + -1.38888888888741095749e-3) * z + 4.16666666666666019037e-2;
    const double sin_r = r + (r * z) * s;
    const double cos_r = (1.0 - 0.5 * z) + (z * z) * c;
    switch (static_cast<long long>(n) & 3) {
        case 0: sine = float(sin_r); cosine = float(cos_r); return;
        case 1: sine = float(cos_r); cosine = float(-sin_r); return;
        case 2: sine = float(-sin_r); cosine = float(-cos_r); return;
        default: sine = float(-cos_r); cosine = float(sin_r); return;
    }
}

}  // namespace mill
