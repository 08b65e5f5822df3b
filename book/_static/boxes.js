// Boxes that scroll say so, and only those can be reached with the keyboard: their sizes are known on the page alone.
(() => {
    const look = (box) => {
        const wide = box.scrollWidth > box.clientWidth + 1;
        box.classList.toggle("ee-wide", wide);
        box.classList.toggle("ee-at-end", wide && box.scrollLeft + box.clientWidth >= box.scrollWidth - 2);
        for (const [name, value] of [["tabindex", "0"], ["role", "region"]]) {
            if (wide) box.setAttribute(name, value);
            else box.removeAttribute(name);
        }
    };
    const start = () => {
        const observer = new ResizeObserver((entries) => entries.forEach((entry) => look(entry.target.closest(".ee-scroll"))));
        for (const box of document.querySelectorAll(".ee-scroll")) {
            observer.observe(box);
            if (box.firstElementChild) observer.observe(box.firstElementChild);
            box.addEventListener("scroll", () => look(box), {passive: true});
        }
    };
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
    else start();
})();
