// Sets the chosen theme before the first paint, so it is a plain script in the page's head.
document.documentElement.dataset.theme = localStorage.getItem("manta-theme") ?? "auto";
