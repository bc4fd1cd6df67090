// Texts from runs reach the page through textContent only, never as markup.
"use strict";

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const WORDS = JSON.parse($("#words").textContent);
const root = document.documentElement;

// Language, theme, copying, and small helpers.

function language() {
  return root.lang === "zh" ? 1 : 0;
}

function say(key, given = {}) {
  const text = WORDS[key][language()];
  return text.replace(/\{(\w+)\}/g, (_, name) => String(given[name]));
}

const repaint = []; // called when the language or the theme changes

function keep(name, value) {
  try {
    localStorage.setItem(`rlprobe-${name}`, value);
  } catch {
    // a page opened from disk may have no storage: then the choice lasts as long as the page
  }
}

function kept(name) {
  try {
    return localStorage.getItem(`rlprobe-${name}`);
  } catch {
    return null;
  }
}

function setLanguage(value) {
  root.lang = value;
  keep("lang", value);
  for (const element of $$("[data-say]")) element.textContent = say(element.dataset.say);
  for (const element of $$("[data-say-label]")) {
    element.setAttribute("aria-label", say(element.dataset.sayLabel));
  }
  for (const element of $$("[data-label-zh]")) {
    const { labelEn, labelZh } = element.dataset;
    element.setAttribute("aria-label", language() ? labelZh : labelEn);
  }
  for (const element of $$("[data-say-hint]")) element.placeholder = say(element.dataset.sayHint);
  labelCells();
  for (const paint of repaint) paint();
}

// On a phone a row is a list, and each of its cells says what it is of.
function labelCells() {
  const spoken = (header) => [...header.childNodes]
    .filter((part) => !part.lang || part.lang === root.lang).map((part) => part.textContent).join("").trim();
  for (const table of $$(".scroll > table")) {
    const labels = $$("thead th", table).map(spoken);
    for (const row of $$("tbody tr", table)) {
      [...row.cells].forEach((cell, at) => { cell.dataset.label = labels[at] ?? ""; });
    }
  }
}

function setTheme(value) {
  root.dataset.theme = value;
  keep("theme", value);
  for (const paint of repaint) paint();
}

function isDark() {
  const chosen = root.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // no permission for pages from disk: select the text, so that a key press copies it
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = say("copied");
  setTimeout(() => (button.textContent = say(button.dataset.say)), 1500);
}

function node(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function grouped(count) {
  return count.toLocaleString("en-US");
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value === "inf" ? "∞" : value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function size(value) {
  if (value === "inf") return Infinity;
  return typeof value === "number" ? value : null;
}

function wireSwitches() {
  $("#language").addEventListener("click", () => setLanguage(language() ? "en" : "zh"));
  $("#theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  const theme = kept("theme");
  if (theme) root.dataset.theme = theme;
}
