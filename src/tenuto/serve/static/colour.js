// Colours of sessions: equal lightness and chroma in OKLCH, with hues as far apart as possible.
// Source of the conversion: B. Ottosson, "A perceptual color space for image processing" (2020).

const GOLDEN_ANGLE = 137.508;

function linear(l, c, h) {
  const a = c * Math.cos((h * Math.PI) / 180);
  const b = c * Math.sin((h * Math.PI) / 180);
  const l3 = (l + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m3 = (l - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s3 = (l - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l3 - 3.3077115913 * m3 + 0.2309699292 * s3,
    -1.2684380046 * l3 + 2.6097574011 * m3 - 0.3413193965 * s3,
    -0.0041960863 * l3 - 0.7034186147 * m3 + 1.707614701 * s3,
  ];
}

function gamma(value) {
  const v = Math.min(1, Math.max(0, value));
  return Math.round(255 * (v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055));
}

// Returns [red, green, blue], each 0 to 255.
export function oklch(lightness, chroma, hue) {
  return linear(lightness, chroma, hue).map(gamma);
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function hueOf(number) {
  return (28 + number * GOLDEN_ANGLE) % 360;
}

// Returns the colour of session `number`, [red, green, blue].
export function rgbOf(number, dark = isDark()) {
  const step = Math.floor(number / 24) % 3; // neighbours in hue differ in lightness, too
  return oklch((dark ? 0.74 : 0.66) - 0.05 * step, dark ? 0.115 : 0.125, hueOf(number));
}

export function cssOf(number) {
  const [r, g, b] = rgbOf(number);
  return `rgb(${r} ${g} ${b})`;
}

// Returns the colour as canvases store it: alpha, blue, green, red from the highest byte.
export function pack([r, g, b]) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export function mix([r, g, b], [r2, g2, b2], share) {
  const part = (one, two) => Math.round(one * (1 - share) + two * share);
  return [part(r, r2), part(g, g2), part(b, b2)];
}
