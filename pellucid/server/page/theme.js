// Light or dark: as was chosen here, else as the system is.  Runs before anything is painted.

{
  const system = matchMedia("(prefers-color-scheme: dark)");
  const set = () => {
    document.documentElement.dataset.theme = localStorage.getItem("theme") ?? (system.matches ? "dark" : "light");
  };
  system.addEventListener("change", set);
  set();
}
