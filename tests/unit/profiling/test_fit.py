import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hiertrain.profiling.fit import fit_affine

COUNTS = (1, 16, 32, 64, 128)


def test_affine_numbers_are_recovered_exactly():
    fit = fit_affine({n: [2e-4 + 3e-6 * n] * 5 for n in COUNTS})
    assert fit.fixed == pytest.approx(2e-4, rel=1e-9)
    assert fit.per_sample == pytest.approx(3e-6, rel=1e-9)
    assert fit.relative_spread == pytest.approx(0.0, abs=1e-9)
    assert fit.sample_counts == COUNTS


def test_the_median_ignores_a_hiccup():
    fit = fit_affine({n: [1e-3 + 1e-5 * n] * 10 + [1.0] for n in COUNTS})
    assert fit.fixed == pytest.approx(1e-3, rel=1e-9)
    assert fit.per_sample == pytest.approx(1e-5, rel=1e-9)


def test_a_time_that_shrinks_with_samples_becomes_a_constant():
    fit = fit_affine({1: [3e-3], 10: [2e-3], 100: [1e-3]})
    assert fit.per_sample == 0.0
    assert fit.fixed == 1e-3  # through the largest count


def test_a_time_that_grows_faster_than_samples_has_no_fixed_part():
    fit = fit_affine({1: [1e-3], 10: [2e-2], 100: [3e-1]})
    assert fit.fixed == 0.0
    assert fit(100) == pytest.approx(3e-1)


def test_one_count_is_taken_to_grow_with_the_samples():
    fit = fit_affine({4: [8e-3, 8e-3]})
    assert (fit.fixed, fit.per_sample) == (0.0, pytest.approx(2e-3))


def test_nothing_measured_stays_nothing():
    fit = fit_affine({n: [0.0, 0.0] for n in COUNTS})
    assert (fit.fixed, fit.per_sample, fit.relative_spread) == (0.0, 0.0, 0.0)


def test_no_measurement_is_refused():
    with pytest.raises(ValueError, match="no measurement to fit"):
        fit_affine({8: []})


def test_the_spread_is_the_median_distance_from_the_fit():
    fit = fit_affine({n: [0.8e-5 * n, 1e-5 * n, 1.2e-5 * n] for n in COUNTS})
    assert fit.relative_spread == pytest.approx(0.2, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(
        st.tuples(st.floats(0, 1e-2), st.floats(1e-7, 1e-3), st.floats(0, 0.3)),
        min_size=1,
        max_size=12,
    )
)
def test_layers_add_up_to_the_whole_step_at_the_mini_batch(layers):
    """Also where times are not affine: each layer is up to 30 % slower on a single sample."""

    def time(fixed, per_sample, bend, n):
        return (fixed + per_sample * n) * (1 + bend / n)

    whole = sum(time(*layer, 128) for layer in layers)
    fits = [fit_affine({n: [time(*layer, n)] for n in COUNTS}) for layer in layers]
    assert sum(fit(128) for fit in fits) == pytest.approx(whole, rel=1e-9)
    assert all(fit.fixed >= 0 and fit.per_sample >= 0 for fit in fits)
