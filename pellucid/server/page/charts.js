// The two small charts of the last seconds.

import { number, time } from "./figures.js";
import { colours, fit } from "./paint.js";

const SPAN = 20; // seconds

class Chart {
  constructor(canvas) {
    this.canvas = canvas;
    this.points = []; // [seconds, value]
  }

  add(seconds, value) {
    this.points.push([seconds, value]);
  }

  forget() {
    this.points = [];
  }

  begin(seconds) {
    while (this.points.length && this.points[0][0] < seconds - SPAN - 2) this.points.shift();
    const { pen, width, height } = fit(this.canvas);
    pen.clearRect(0, 0, width, height);
    return { pen, width, height, x: (at) => width * (1 - (seconds - at) / SPAN) };
  }
}

/** A value that is always there, as an area. */
export class Area extends Chart {
  draw(seconds) {
    const { pen, width, height, x } = this.begin(seconds);
    if (this.points.length < 2) return;
    const most = Math.max(...this.points.map(([, value]) => value));
    const y = (value) => height - 3 - (height * 0.66 * value) / Math.max(10, most);
    pen.beginPath();
    for (const [at, value] of this.points) pen.lineTo(x(at), y(value));
    pen.strokeStyle = colours().accent;
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    pen.stroke();
    pen.lineTo(x(this.points.at(-1)[0]), height);
    pen.lineTo(x(this.points[0][0]), height);
    pen.globalAlpha = 0.12;
    pen.fillStyle = colours().accent;
    pen.fill();
    pen.globalAlpha = 1;
    fadeIn(pen, width, height);
    caption(pen, width, `most ${number(most)}`);
  }
}

/** Events, each as a dot as high as its value; ten times as much is always as much higher. */
export class Dots extends Chart {
  draw(seconds) {
    const { pen, width, height, x } = this.begin(seconds);
    const logs = this.points.map(([, value]) => Math.log10(Math.max(1e-4, value)));
    const low = Math.min(-2.5, ...logs), high = Math.max(-0.5, ...logs);
    pen.fillStyle = colours().accent;
    pen.globalAlpha = 0.75;
    for (const [index, [at]] of this.points.entries()) {
      pen.beginPath();
      pen.arc(x(at) - 4, height - 8 - (height * 0.6 * (logs[index] - low)) / (high - low), 2.6, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    fadeIn(pen, width, height);
    if (this.points.length) caption(pen, width, `longest ${time(Math.max(...this.points.map(([, value]) => value)))}`);
  }
}

function caption(pen, width, text) {
  pen.fillStyle = colours().faint;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.fillText(text, width - 12, 20);
}

/** The past comes out of nothing, where the number stands. */
function fadeIn(pen, width, height) {
  const veil = pen.createLinearGradient(0, 0, width * 0.45, 0);
  veil.addColorStop(0, "rgb(0 0 0 / 100%)");
  veil.addColorStop(1, "rgb(0 0 0 / 0%)");
  pen.globalCompositeOperation = "destination-out";
  pen.fillStyle = veil;
  pen.fillRect(0, 0, width * 0.45, height);
  pen.globalCompositeOperation = "source-over";
}
